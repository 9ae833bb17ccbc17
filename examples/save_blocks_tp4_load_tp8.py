"""Four tensor-parallel ranks save their blocks; eight ranks load them, and four again.

    python examples/save_blocks_tp4_load_tp8.py

Each rank has a block stack: a tensor for every block, layer and K or V, as an engine with block
pools keeps them. What is saved is universal blocks, (heads, layers, K and V, tokens, dim): the
heads of a rank are one slice, so that it does not matter how many ranks load them. On a GPU the
same calls take CUDA tensors.
"""

import time

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_adapters import kvbm

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE, TOTAL_KV_HEADS, HEAD_DIM = 6, 8, 16, 8, 128


def stacks(tp_size, layout):
    """The stacks of all ranks: [rank][block][layer * 2 + K or V], empty."""
    heads = TOTAL_KV_HEADS // tp_size
    chunk = (BLOCK_SIZE, heads, HEAD_DIM) if layout == "NHD" else (heads, BLOCK_SIZE, HEAD_DIM)
    return [
        [
            [torch.zeros(chunk, dtype=torch.bfloat16) for _ in range(NUM_LAYERS * 2)]
            for _ in range(NUM_BLOCKS)
        ]
        for _ in range(tp_size)
    ]


def heads_of(ranks, layout):
    """All heads of all ranks: (blocks, layers * 2, heads, tokens, dim)."""
    of_ranks = torch.stack([torch.stack([torch.stack(block) for block in rank]) for rank in ranks])
    if layout == "NHD":
        of_ranks = of_ranks.transpose(3, 4)
    return of_ranks.movedim(0, 2).flatten(2, 3)


def save(ranks, layout, universals):
    heads = TOTAL_KV_HEADS // len(ranks)
    for rank, blocks in enumerate(ranks):
        kvbm.block_to_universal(blocks, universals, layout, head_start=rank * heads)


def load(universals, ranks, layout):
    heads = TOTAL_KV_HEADS // len(ranks)
    for rank, blocks in enumerate(ranks):
        kvbm.universal_to_block(universals, blocks, layout, head_start=rank * heads)


universal = (TOTAL_KV_HEADS, NUM_LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
universals = [torch.zeros(universal, dtype=torch.bfloat16) for _ in range(NUM_BLOCKS)]
four, eight, four_again = stacks(4, "NHD"), stacks(8, "HND"), stacks(4, "NHD")
for rank in four:
    for block in rank:
        for chunk in block:
            chunk.normal_()

start = time.perf_counter()
save(four, "NHD", universals)
load(universals, eight, "HND")
load(universals, four_again, "NHD")
ms = (time.perf_counter() - start) * 1e3

expected = heads_of(four, "NHD")
assert torch.equal(heads_of(eight, "HND"), expected)
assert torch.equal(heads_of(four_again, "NHD"), expected)
megabytes = sum(block.nbytes for block in universals) / 1e6
print(f"{megabytes:.1f} MB saved by 4 ranks, loaded by 8 and by 4 again in {ms:.1f} ms: exact")
