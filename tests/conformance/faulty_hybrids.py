"""KVXConnector in vLLM with one fault each: for cases of hybrid models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvx_adapters.vllm_plugin import connector
from kvx_adapters.vllm_plugin.connector import KVXConnector
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
