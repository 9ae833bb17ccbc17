"""Models: what is computed by other weights is not shared, wherever they come from."""

from __future__ import annotations

from kvx_conformance.case import case
from kvx_conformance.connector import Setup
from kvx_conformance.connector_probe import PLAIN, Probe, share, share_nothing

_SECONDS = 240.0


@case("benchmarks/peers.py: ExampleConnector goes on with another model's tokens", seconds=_SECONDS)
def another_layer_shares_nothing(probe: Probe) -> None:
    """A model that differs in one tensor of one layer shares nothing, and stores nothing under the
    other's name.
    """
    share_nothing(probe, PLAIN, Setup(weights="layer", place="other"))


@case("vLLM #42695, #49261, #55776: a key that does not know the revision", seconds=_SECONDS)
def files_that_were_replaced_share_nothing(probe: Probe) -> None:
    """A model whose files have taken the place of others, at the same path, shares nothing."""
    share_nothing(probe, PLAIN, Setup(weights="layer"))


@case("a digest of a sample of the weights misses a fine-tune of some rows", seconds=_SECONDS)
def some_rows_share_nothing(probe: Probe) -> None:
    """A model that differs in some rows of its embedding shares nothing."""
    share_nothing(probe, PLAIN, Setup(weights="rows", place="other"))


@case("vLLM: load_format=dummy under a real model's name", seconds=_SECONDS)
def random_weights_share_nothing(probe: Probe) -> None:
    """An engine that has made random weights of its own does not store under the model's name."""
    share_nothing(probe, PLAIN, Setup(weights="random"))


@case("LMCache, vLLM: the key is the model's name alone", seconds=_SECONDS)
def one_name_for_two_models_shares_nothing(probe: Probe) -> None:
    """Two models that are served under one name share nothing."""
    of_other = Setup(weights="layer", place="other", name="model")
    share_nothing(probe, Setup(name="model"), of_other)


@case("a config that is edited beside the same weights", seconds=_SECONDS)
def another_config_shares_nothing(probe: Probe) -> None:
    """The same weights with another epsilon of the norms share nothing."""
    share_nothing(probe, PLAIN, Setup(epsilon=0.5, place="other"))


@case("machines have a model at paths of their own", seconds=_SECONDS)
def a_copy_of_the_files_shares(probe: Probe) -> None:
    """The same files at another path share."""
    share(probe, PLAIN, Setup(place="elsewhere"))


@case("a name is for users, not for keys", seconds=_SECONDS)
def another_name_shares(probe: Probe) -> None:
    """The same model served under another name shares."""
    share(probe, PLAIN, Setup(name="another"))
