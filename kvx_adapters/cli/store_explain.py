"""`kvx store explain`: how much of a prompt a store has, and why no more."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvx_adapters.cli.store_options import (
    AsJson,
    EncryptionKeyFiles,
    Epoch,
    KeyFiles,
    Model,
    Salt,
    StorePath,
    age_text,
    check_model,
    errors,
    opened,
    secrets_of,
    steps,
)
from kvx_adapters.cli.store_walk import Walk, differences, walk
from kvx_core import InvalidArgumentError
from kvx_core.errors import printable
from kvx_core.snapshot import token_ids
from kvx_core.stores.names import Ids

_SHOWN = 12  # digits of hashes
_MOST_NEAR = 5  # other spaces that are shown
_MOST_FACTS = 12  # differences of a space that are shown
_MOST_TOKENS = 1 << 24
_MOST_WORDS = 60  # characters of a text that is as long as a file says
_MOST_SHOWN = 20  # spaces that are asked


def _explain(
    path: StorePath,
    tokens: Annotated[
        str,
        typer.Argument(help="A file with token ids, or with text (--tokenizer); - is the input."),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="TOKENS is text, for this tokenizer.json.")
    ] = None,
    model: Model = None,
    salt: Salt = None,
    epoch: Epoch = None,
    key_files: KeyFiles = None,
    encryption_key_files: EncryptionKeyFiles = None,
    as_json: AsJson = False,
) -> None:
    """Say how many tokens of a prompt are stored, where that ends, and why.

    Ids are numbers between commas or spaces, as JSON has them or not. --model is what the engine's
    log says at its start; without it, all models of the store are asked. Other models, epochs and
    salts that have more of the prompt are shown with what differs: no engine finds those under the
    names that it asks for. A store with keys is judged by names alone without them.
    """
    with errors():
        check_model(model)
        ids = _ids(tokens, tokenizer)
        found = opened(path, secrets_of(key_files, encryption_key_files))
        spaces = found.spaces()
        chosen = {space.name for space in found.spaces(salt=salt, model=model, epoch=epoch)}
        walks = []
        with steps("looking", len(spaces)) as step:
            for space in spaces:
                walks.append(walk(found, space, ids))
                step()
    walks.sort(key=lambda one: -one.usable)
    asked = [one for one in walks if one.space.name in chosen]
    most = asked[0].usable if asked else 0
    near = [one for one in walks if one not in asked and one.usable > most][:_MOST_NEAR]
    if as_json:
        facts = [_facts(one, None) for one in asked]
        others = [_facts(one, asked[0] if asked else None) for one in near]
        print(json.dumps({"num_tokens": len(ids), "asked": facts, "others": others}, indent=1))
        return
    if not asked:
        what = "nothing" if not walks else "nothing of it"
        print(
            f"The store has {what}: no engine has stored a prompt of this model, epoch and salt, "
            "or all of it was evicted. `kvx store ls` lists what is there"
        )
    shown = [one for one in asked if one.usable or one.windowed[1]][:_MOST_SHOWN] or asked[:1]
    for one in shown:
        _print(one, len(ids))
    if len(asked) > len(shown):
        print(f"{len(asked) - len(shown):,} other models, epochs and salts have no more of it.")
    for one in near:
        print()
        _print(one, len(ids))
        for name, mine, its in (
            differences(asked[0].space, one.space)[:_MOST_FACTS] if asked else ()
        ):
            print(printable(f"  other {name}: {its[:80]}, expected {mine[:80]}"))


def add_to(app: typer.Typer) -> None:
    """Makes it a command."""
    app.command("explain")(_explain)


def _print(one: Walk, num_tokens: int) -> None:
    space = one.space
    salt = f", salt {space.record.salt[:_SHOWN]}" if space.record and space.record.salt else ""
    epoch = (
        f", epoch {space.record.epoch[:_MOST_WORDS]}" if space.record and space.record.epoch else ""
    )
    name = space.record.fingerprint[:_SHOWN] if space.record else "?"
    print(printable(f"Model {name}{salt}{epoch}: {one.usable:,} of {num_tokens:,} tokens"))
    if one.files:
        used, words = age_text(min(file.used for file in one.files)), " ".join(one.precisions)
        print(f"  {len(one.files):,} files of {words}, the least recently used {used} ago")
    layers, more = one.windowed
    if more:
        print(f"  {more:,} where a sliding window has left layers {layers}")
    if one.why:
        print(printable(f"  no more: {one.why}"))


def _facts(one: Walk, asked: Walk | None) -> dict[str, Any]:
    record = one.space.record
    differs = [] if asked is None else differences(asked.space, one.space)
    return {
        "space": one.space.name,
        "model": record.fingerprint if record else None,
        "epoch": record.epoch if record else None,
        "salt": record.salt if record else None,
        "num_tokens": one.usable,
        "num_tokens_without_states": one.num_tokens,
        "num_tokens_with_windows": one.windowed[1] or None,
        "why": one.why or None,
        "num_files": len(one.files),
        "precisions": one.precisions,
        "differs": [{"name": name, "asked": mine, "here": its} for name, mine, its in differs],
    }


def _ids(tokens: str, tokenizer: Path | None) -> Ids:
    """Returns the ids that TOKENS says. Raises InvalidArgumentError, OSError."""
    try:
        text = sys.stdin.read() if tokens == "-" else Path(tokens).read_text()
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"TOKENS is {tokens}, a file of bytes, expected text") from None
    except OSError as error:
        raise InvalidArgumentError(
            f"TOKENS is {tokens[:200]}, expected a file, or - for the input: {error.strerror}"
        ) from None
    if tokenizer is not None:
        found = _encoded(text, tokenizer)
    else:
        words = text.strip().strip("[]").replace(",", " ").split()
        wrong = next((word for word in words if not re.fullmatch(r"-?[0-9]{1,19}", word)), None)
        if wrong is not None:
            raise InvalidArgumentError(
                f"TOKENS has {wrong[:40]!r}, expected ids: numbers between commas or spaces. "
                "--tokenizer makes ids of text"
            )
        found = [int(word) for word in words]
    if not 0 < len(found) <= _MOST_TOKENS:
        raise InvalidArgumentError(f"TOKENS has {len(found):,} ids, expected 1 to {_MOST_TOKENS:,}")
    return np.ascontiguousarray(token_ids(found), np.int64)


def _encoded(text: str, tokenizer: Path) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InvalidArgumentError(
            "--tokenizer needs the package tokenizers: pip install tokenizers"
        ) from None
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise InvalidArgumentError(f"--tokenizer is {tokenizer}, expected a tokenizer.json")
    try:
        return list(Tokenizer.from_file(str(path)).encode(text).ids)
    except Exception as error:
        raise InvalidArgumentError(f"--tokenizer is {tokenizer}: {str(error)[:200]}") from None
