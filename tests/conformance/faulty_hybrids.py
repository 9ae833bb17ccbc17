"""KVXConnector in vLLM with one fault each: for cases of hybrid models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvx_adapters.vllm_plugin import connector, worker
from kvx_adapters.vllm_plugin.connector import KVXConnector
from kvx_adapters.vllm_plugin.states import States
from kvx_core.stores.model_sections import ModelPlanes, ModelSections
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.walk import Walk
from tests.conformance.faulty_connectors import Faulty

# By its name alone, a connector with another name than KVX's has another one beside it.
connector.is_alone = lambda config: True


class CountsAStateShortConnector(KVXConnector):
    """Stores a state as one of a token less than it stands for."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        step = super().build_connector_meta(scheduler_output)
        step.saves[:] = [
            replace(save, tokens=save.tokens[:-1]) if save.has_states else save
            for save in step.saves
        ]
        return step


class CountsAStateShort(Faulty):
    pass


class TakesFailedLoadsForGoodConnector(KVXConnector):
    """Says of each load that it has ended, and of none that it has failed."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        ended = found.finished_recving | found.failed_recving
        return type(found)(found.finished_sending, ended, set())


class TakesFailedLoadsForGood(Faulty):
    pass


class LeavesTheRestOfABlockConnector(KVXConnector):
    """Zeroes nothing behind the tokens that it loads."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        worker.zero_behind = lambda *arguments: None
        super().__init__(*arguments, **keywords)


class LeavesTheRestOfABlock(Faulty):
    pass


class AsksForNoStatesConnector(KVXConnector):
    """Takes keys and values for a hit, and loads no state."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        PrefixStore.walk = _of_tokens_alone
        ModelPlanes.check_load = lambda *arguments: None
        ModelSections.all_of = _but_what_is_loaded(ModelSections.all_of)
        super().__init__(*arguments, **keywords)


def _of_tokens_alone(store: Any, tokens: Any, num_tokens: int, at_least: int = 1) -> Walk:
    return Walk(tokens, num_tokens, at_least, False)


def _but_what_is_loaded(all_of: Any) -> Any:
    def found(model: Any, sections: Any, *, states: bool = False, captured: bool = False) -> Any:
        if states and not captured:
            return []
        return all_of(model, sections, states=states, captured=captured)

    return found


class AsksForNoStates(Faulty):
    pass


class TakesTheOthersSliceConnector(KVXConnector):
    """The first rank takes the states of the last."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        States.heads_of = _of_the_last(States.heads_of)
        States._described = _of_the_last(States._described)
        super().__init__(*arguments, **keywords)


def _of_the_last(function: Any) -> Any:
    """Calls a function, whose last argument is a rank, with the rank counted from the end."""

    def called(states: Any, *arguments: Any) -> Any:
        *others, rank = arguments
        return function(states, *others, states.num_ranks - 1 - rank)

    return called if function.__name__ != "called" else function  # another half has done it


class TakesTheOthersSlice(Faulty):
    pass
