"""Looks into a store of prefixes and edits it: lists, verifies, removes, copies to another store.

    python examples/edit_a_store.py

`kvx store` does most of this from a shell; a program can do what it has no option for, such as to
carry prompts over to a store with another key. The store is one that the example makes.
"""

import secrets
import tempfile
from pathlib import Path

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
)
from kvx_core.stores import Inventory

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 32
LAYERS = tuple(range(NUM_LAYERS))
MODEL = "a model"
FACTS = CacheFacts(
    fingerprint=MODEL,
    rotary="half",
    rotary_dim=HEAD_DIM,
    rope_applied=True,
    first_kv_head=0,
    total_kv_heads=NUM_KV_HEADS,
)


def prefixes(folder, salt="", key=None):
    """The prefixes of the model in a directory, for one tenant, signed with a key or not."""
    return PrefixStore(
        Directory(folder),
        fingerprint=MODEL,
        num_layers=NUM_LAYERS,
        total_kv_heads=NUM_KV_HEADS,
        precision=Precision.of("bfloat16"),
        chunk_tokens=16,
        salt=salt,
        key=key,
    )


def memory(num_tokens):
    """Keys and values of all layers for one sequence, and what says so to a store."""
    kv = torch.randn(NUM_LAYERS, 2, 1, num_tokens, NUM_KV_HEADS, HEAD_DIM).bfloat16()
    layers = [CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in kv]
    return kv, Section(LAYERS, CacheView(tuple(layers), FACTS, dense=True), None)


def save(store, prompt, section):
    for start, stop in store.spans(len(prompt)):
        store.commit(store.capture(prompt, start, stop, [section]))


def prompts(inventory, space):
    """The tokens of the longest prompts of a space: an entry names the key of what is before it."""
    before = {space.name: ()}  # the key of no tokens at all
    entries = []
    for stored in space.entries:
        with inventory.opened_entry(stored) as entry:
            entries.append((entry.start, entry.parent, stored.key, tuple(entry.tokens.tolist())))
    for _, parent, key, tokens in sorted(entries):
        if parent in before:  # else what it continues is not there
            before[key] = before[parent] + tokens
    continued = {parent for _, parent, _, _ in entries}
    return [list(tokens) for key, tokens in before.items() if key not in continued]


def show(title, folder):
    print(title)
    inventory = Inventory(Directory(folder))
    for space in inventory.spaces():
        signed = ", signed" if space.is_signed else ""
        num_tokens = sum(inventory.tokens(space).values())
        print(f"  {space.num_entries} entries, {num_tokens} tokens{signed}")


temporary = tempfile.TemporaryDirectory()
folder, other = Path(temporary.name, "store"), Path(temporary.name, "other")
long, short = list(range(40)), [*range(16), 90, 91, 92]  # they begin alike and share an entry
for prompt in (long, short):
    save(prefixes(folder), prompt, memory(len(prompt))[1])
save(prefixes(folder, salt="tenant-7"), list(range(50, 80)), memory(30)[1])
show("A store of two tenants:", folder)

# List: the tokens of each prompt. The space of the tenant without a salt is the larger one.
directory = Directory(folder)
inventory = Inventory(directory)
space = max(inventory.spaces(), key=lambda space: space.num_entries)
for tokens in prompts(inventory, space):
    print(f"  a prompt of {len(tokens)} tokens: {tokens[:3]} ... {tokens[-2:]}")

# Verify: every byte of every file. A bad one is deleted; engines would compute its tokens.
num_tokens = inventory.tokens(space)
bad = next(stored for stored in space.entries if num_tokens[stored.key] == 3)
with open(folder / bad.name, "r+b") as file:
    file.seek(-1, 2)
    last = file.read(1)[0]
    file.seek(-1, 2)
    file.write(bytes([last ^ 1]))
judged = list(inventory.verify())
broken = [stored for stored, error in judged if error is not None]
deleted = list(inventory.delete(broken))
print(f"{len(judged)} files verified, {len(broken)} bad, {len(deleted)} deleted")

# Remove: all that a tenant has stored.
chosen, unknown = Inventory(directory).chosen(salt="tenant-7")
assert not unknown  # spaces whose salt cannot be told
print(f"{len(list(inventory.delete(chosen)))} files of tenant-7 removed")

# Copy: what is left of each prompt, into a store whose files are signed with a new key.
source, target = prefixes(folder), prefixes(other, key=secrets.token_bytes(32))
inventory = Inventory(directory)
(space,) = inventory.spaces()
for tokens in prompts(inventory, space):
    values, room = memory(len(tokens))
    match = source.lookup(tokens)
    source.load(match, 0, match.num_tokens, [room])
    save(target, tokens[: match.num_tokens], room)
    again, place = memory(match.num_tokens)
    target.load(target.lookup(tokens), 0, match.num_tokens, [place])
    assert torch.equal(again, values[:, :, :, : match.num_tokens])
show("The other store:", other)
