"""Describes a pool of TensorRT-LLM in place: writes, gathers, offloads and brings tokens back.

    python examples/trtllm_pool_bridge.py

TensorRT-LLM does not run: the pools are CPU memory of its layout, and its tensors and numbers are
written out. In its process they come from KVCacheManager; pools are then Memory.DEVICE.
"""

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_adapters import tensorrt_llm
from kvx_adapters.tensorrt_llm import PoolIndex, block_offsets
from kvx_core import BlockTable, CacheFacts, Memory, gather_kv, migrate, write_kv

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, NUM_TOKENS = 4, 2, 64, 101

# What TensorRT-LLM says: which pool has which layer, and its sizes. Then, where the pools are.
(spec,) = tensorrt_llm.pool_specs(
    torch.tensor([[0, layer] for layer in range(NUM_LAYERS)], dtype=torch.int32),
    num_blocks=[12],
    num_secondary_blocks=[6],
    tokens_per_block=32,
    num_kv_heads_per_layer=[NUM_KV_HEADS] * NUM_LAYERS,
    head_dim=HEAD_DIM,
    dtype="HALF",
)
primary = torch.zeros(spec.pool_shape, dtype=torch.float16)
secondary = torch.zeros(6, *spec.pool_shape[1:], dtype=torch.float16)
pool_pointers = torch.tensor([[primary.data_ptr(), secondary.data_ptr()]])

facts = CacheFacts(fingerprint="a model", rotary="half", rotary_dim=HEAD_DIM, rope_applied=True)
(view,) = tensorrt_llm.cache_views(pool_pointers, [spec], [facts], memory=Memory.HOST)
assert view.layers[0].k.data == primary.data_ptr()  # zero-copy


def table(blocks):
    """One sequence's row of kv_cache_block_offsets."""
    return block_offsets([blocks], spec, max_blocks_per_seq=8)


def hex_of(offsets):
    return " ".join(f"{offset & 0xFFFFFFFF:08x}" for offset in offsets[0, 0, 0, :4].tolist())


def gathered(offsets):
    """The sequence's keys and values in all layers, as `offsets` finds them."""
    shape = (NUM_LAYERS, 1, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    keys, values = torch.empty(shape).half(), torch.empty(shape).half()
    for layer, out in zip(view.layers, zip(keys, values, strict=True), strict=True):
        gather_kv(
            layer,
            BlockTable.kv_offsets(offsets),
            [NUM_TOKENS],
            out=out,
            secondary_num_blocks=spec.num_secondary_blocks,
        )
    return keys[:, 0], values[:, 0]


# Write a sequence into blocks 7, 2, 11 and 4. slot = block * tokens_per_block + offset in it.
first = [7, 2, 11, 4]
slots = torch.tensor(first).repeat_interleave(32) * 32 + torch.arange(32).repeat(4)
keys, values = torch.randn(2, NUM_LAYERS, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM).half()
for layer, key, value in zip(view.layers, keys, values, strict=True):
    write_kv(layer, key, value, slots[:NUM_TOKENS])
here = table(first)
assert all(map(torch.equal, gathered(here), (keys, values)))
print("written and gathered  ", hex_of(here))

# Offload it: the same pool, blocks 5, 0, 3 and 1 of its secondary part. Bit 31 says so.
away = table([PoolIndex(block, is_secondary=True) for block in (5, 0, 3, 1)])
num_bytes = migrate(
    view.at(BlockTable.kv_offsets(here)), view.at(BlockTable.kv_offsets(away)), [NUM_TOKENS]
)
primary[first] = torch.nan  # the blocks are another sequence's now
assert all(map(torch.equal, gathered(away), (keys, values)))
print("in the secondary pool ", hex_of(away), f" {num_bytes} bytes")

# Bring it back, to where there is room.
back = table([8, 10, 0, 9])
migrate(view.at(BlockTable.kv_offsets(away)), view.at(BlockTable.kv_offsets(back)), [NUM_TOKENS])
assert all(map(torch.equal, gathered(back), (keys, values)))
print("in the primary again  ", hex_of(back))
