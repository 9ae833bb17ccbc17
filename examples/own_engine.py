"""An engine that KVX has no adapter for: described, proved, migrated, verified, stored.

    python examples/own_engine.py

Its pages have an order of axes that no layout names. Nothing is copied to describe it, and nothing
of KVX has to know the engine.
"""

import tempfile

import needed  # noqa: F401  says what to install if a package is missing
import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    Directory,
    Precision,
    PrefixStore,
    Section,
    describe,
    gather_kv,
    migrate,
    verify,
)

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, PAGE = 2, 3, 40, 8


class Engine:
    """Pages of 8 tokens. All layers of a page lie together; K is transposed in it, V is not."""

    def __init__(self, num_pages):
        self.pages = torch.zeros(num_pages, NUM_LAYERS, 2, NUM_KV_HEADS, PAGE * HEAD_DIM)

    def write(self, pages, layer, key, value):
        """key, value: (num_tokens, num_kv_heads, head_dim), from the sequence's first token on."""
        for t in range(len(key)):
            k, v = self.pages[pages[t // PAGE], layer]
            k.view(NUM_KV_HEADS, HEAD_DIM, PAGE)[:, :, t % PAGE] = key[t]
            v.view(NUM_KV_HEADS, PAGE, HEAD_DIM)[:, t % PAGE] = value[t]

    def view(self, facts):
        """What KVX is told: tensor views whose axes are named."""
        layers = []
        for layer in range(NUM_LAYERS):
            k = self.pages[:, layer, 0].unflatten(-1, (HEAD_DIM, PAGE))
            v = self.pages[:, layer, 1].unflatten(-1, (PAGE, HEAD_DIM))
            layers.append(
                CacheDesc.from_kv(
                    describe(k, ("block", "head", "dim", "token")),
                    describe(v, ("block", "head", "token", "dim")),
                )
            )
        return CacheView(tuple(layers), facts)


# What the numbers mean. Say what you know: two ends that differ are refused.
facts = CacheFacts(
    engine="an engine of one's own",
    fingerprint="a model",
    rotary="half",
    rotary_dim=HEAD_DIM,
    rope_applied=True,
    first_kv_head=0,  # of the model's heads, those that are held here: needed by stores
    total_kv_heads=NUM_KV_HEADS,
)
engine = Engine(num_pages=12)
view = engine.view(facts)
for layer in view.layers:
    layer.validate()  # shapes, strides, dtypes and memory; not what the engine means by them

# Prove it: the engine writes what is known, KVX reads. 21 tokens fill no page; ids out of order.
prompt = list(range(100, 121))
pages = [7, 2, 10]
tokens = torch.randn(NUM_LAYERS, 2, len(prompt), NUM_KV_HEADS, HEAD_DIM)
for layer, (key, value) in enumerate(tokens):
    engine.write(pages, layer, key, value)
    found_key, found_value = gather_kv(view.layers[layer], [pages], [len(prompt)])
    assert torch.equal(found_key[0], key)
    assert torch.equal(found_value[0], value)
print(f"{len(prompt)} tokens in {NUM_LAYERS} layers are where the description says")

# Migrate into another engine's cache: blocks of 16, tokens before heads, bfloat16.
blocks = torch.zeros(2, NUM_LAYERS, 6, 16, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
other = CacheView(
    tuple(
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
        for k, v in zip(*blocks, strict=True)
    ),
    facts,
)
src, dst = view.at(block_table=[pages]), other.at(block_table=[[4, 1]])
print(migrate(src, dst, [len(prompt)]), "bytes migrated")
print(verify(src, dst, [len(prompt)], tolerance="codec"))  # bfloat16 rounds, and no more than that

# Store them. Another engine of the kind finds the prefix that its prompt shares, and loads it.
with tempfile.TemporaryDirectory() as folder:
    store = PrefixStore(
        Directory(folder),
        fingerprint="a model",
        num_layers=NUM_LAYERS,
        total_kv_heads=NUM_KV_HEADS,
        precision=Precision.of("float32"),
        chunk_tokens=16,
    )
    held = Section(tuple(range(NUM_LAYERS)), view, view.table_of([pages]))
    for start, stop in store.spans(len(prompt)):
        store.commit(store.capture(prompt, start, stop, [held]))

    second = Engine(num_pages=5)
    there = second.view(facts)
    match = store.lookup([*prompt[:19], 7, 8, 9])
    room = Section(tuple(range(NUM_LAYERS)), there, there.table_of([[3, 0, 4]]))
    store.load(match, 0, match.num_tokens, [room])
    print(f"{match.num_tokens} of 22 tokens of another prompt loaded from the store")

lens = [match.num_tokens]
print(verify(view.at(block_table=[pages]), there.at(block_table=[[3, 0, 4]]), lens))
