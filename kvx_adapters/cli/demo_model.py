"""The model of the demo: a tiny Llama that was trained on a few sentences until it repeats them."""

from __future__ import annotations

from pathlib import Path

import torch

# The sentences to repeat: output is readable, and the best token is always far ahead of the second,
# in float32 and in bfloat16. The bar ends the prompt. The prompts have odd lengths from 1 to 91
# tokens, and the first two begin alike, so that vLLM may share their first block.
PASSAGES = (
    "A paged cache keeps the keys and the values of a sequence in blocks of equal size, and a "
    "table says which block comes next. The table is small and the blocks are large, so an engine "
    "hands out blocks one by one, as a library lends books, and takes them back when the reader "
    "has gone.| Nobody wants to compute them twice, and nobody should copy them without knowing "
    "what is written on every page.",
    "A paged cache keeps the keys and the values of a sequence in blocks of equal size, and a "
    "table says which block comes next. Two prompts that begin| alike can share the blocks of "
    "their beginning until their words part ways.",
    "Where the bytes lie is one question and what they mean is another;| an honest copy answers "
    "both before it moves anything, and says so when it cannot.",
    "Odd lengths leave the| last block half filled, and the rest of it belongs to nobody.",
    "Yes|, one word is enough to be remembered.",
)
PROMPTS = [passage.partition("|")[0] for passage in PASSAGES]
# A chat, which the model learns, too; demo_route.py sends it through all engines.
QUESTION = "User: Can one conversation move from engine to engine?\nAssistant:"
ANSWER = (
    "Yes. The keys and the values of all that was said move along, and the next engine goes on in "
    "the middle of the sentence; nobody can tell where one engine stopped and another began."
)
TRAINING_STEPS = 35


def make_model(directory: Path, dtype: str, seed: int) -> str:
    """Trains a tiny Llama to repeat PASSAGES and the chat; saves it and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [passage.replace("|", "") for passage in PASSAGES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        directory
    )

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small that more threads only wait for each other
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    learnt = [*texts, f"{QUESTION} {ANSWER}"]
    rows = [torch.tensor([*tokenizer.encode(text).ids, config.eos_token_id]) for text in learnt]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=TRAINING_STEPS, pct_start=0.15
    )
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        rate.step()
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return (
        f"a Llama of {config.num_hidden_layers} layers, {config.num_attention_heads} heads, "
        f"{config.num_key_value_heads} KV heads of {config.head_dim}, has learnt "
        f"{len(texts)} passages and a chat, loss {loss.item():.3f}"
    )
