"""A prompt that HF transformers computes into a store, as docs/vllm.md says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def transformers_prefills(model_path: Path, path: Path, prompt_ids: Sequence[int]) -> None:
    """Adds the keys and values of a prompt to the store at `path`, which is made if it is new."""
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvx_adapters import transformers as hf
    from kvx_core.snapshot import Precision, Section
    from kvx_core.stores.blobs import Directory
    from kvx_core.stores.prefix import PrefixStore

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt_ids]), past_key_values=cache)

    fingerprint = hf.model_record(model, model_path).fingerprint
    facts = hf.cache_facts(model, fingerprint=fingerprint)
    groups = hf.layer_groups(cache, facts, model)
    store = PrefixStore(
        Directory(path),
        fingerprint=fingerprint,
        num_layers=facts.num_layers,
        total_kv_heads=facts.total_kv_heads,
        precision=Precision.of(model.dtype),
    )
    sections = [Section(group.layers, group.view, None) for group in groups]
    for start, stop in store.spans(len(prompt_ids), 0):
        snapshot = store.capture(prompt_ids, start, stop, sections)
        assert snapshot is not None
        assert store.commit(snapshot) > 0
