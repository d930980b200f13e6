"""Makes the models that the tests of the vLLM engine serve: ``tiny_models.py FOLDER``. Random weights, real formats.

``tiny``: a two-layer Llama with a byte-level BPE tokenizer and a chat template that spells tools the Hermes way and
knows ``<think>``. Its weights are random, but it never takes some tokens unless a grammar leaves it no other: an
answer does not end by itself, and JSON has neither long runs of white space nor control characters, which the grammar
of a string with a maximum length lets pass. ``tiny-adapters/{one,two}``: LoRA adapters for it. ``tiny-score``: the
same body with one score for a head, for rerank. ``tiny-classify``: the same with three classes.

Tokenizer and weights are the same to the byte, whichever Python and processor make them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CORPUS = Path(__file__).parents[2] / "LICENSE"
"""Text that trains the tokenizer: English that hardly ever changes."""
VOCABULARY = 1536
CONTEXT = 8192
HIDDEN = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
RANK = 8
# Wide weights keep the logits apart, so that the order of a sum changes no choice at temperature 0
DEVIATION = 0.3
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
# Parsers read these in the text, so they are tokens of their own without being special
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """\
{{- '<|begin|>' -}}
{%- if tools %}
    {{- '<|system|>Call a function as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Functions: ' -}}
    {{- tools | tojson -}}{{- '<|end|>' -}}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' -}}
    {%- if message.content is string %}{{- message.content -}}{% endif -%}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
    {%- endfor %}
    {%- if not (loop.last and continue_final_message) %}{{- '<|end|>' -}}{% endif -%}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' -}}{% endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Train it on the corpus, whose lines are joined: no token of white space has more than one character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [" ".join(CORPUS.read_text(encoding="utf-8").split())],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(MARKS), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    if bpe.get_vocab_size() != VOCABULARY:
        sys.exit(f"{CORPUS} trains {bpe.get_vocab_size()} tokens, not {VOCABULARY}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def config(words: PreTrainedTokenizerFast, **other: object) -> LlamaConfig:
    """Return the tiny model's, with ``other`` values."""
    values: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "initializer_range": DEVIATION,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return LlamaConfig(**{**values, **other})


def draw(shape: tuple[int, ...], deviation: float, numbers: numpy.random.Generator) -> torch.Tensor:
    """Return normal numbers. NumPy draws them: torch's differ with the vector instructions of the processor."""
    return torch.from_numpy(numbers.standard_normal(shape, dtype=numpy.float32)) * deviation


def drawn(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    numbers = numpy.random.default_rng(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = draw(tuple(weight.shape), DEVIATION, numbers)
    return model


def never_say(model: LlamaForCausalLM, tokens: list[int]) -> None:
    """Push the logits of ``tokens`` some hundreds below all others.

    No layer changes the first channel, which is 1 for every input. So a weight of it in the head is a bias.
    """
    model.model.embed_tokens.weight.data[:, 0] = 1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[0] = 0
        layer.mlp.down_proj.weight.data[0] = 0
    model.lm_head.weight.data[tokens] = 0
    model.lm_head.weight.data[tokens, 0] = -10_000


def adapter(folder: Path, base: Path, seed: int) -> None:
    numbers = numpy.random.default_rng(seed)
    tensors = {}
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", head * KV_HEADS)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = draw((RANK, HIDDEN), 0.5, numbers)
            tensors[f"{key}.lora_B.weight"] = draw((width, RANK), 0.5, numbers)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=1))


def main(out: Path) -> None:
    words = tokenizer()
    texts = [words.decode([token]) for token in range(VOCABULARY)]
    unseen = [token for token, text in enumerate(texts) if text.isspace() or not text.isprintable()]
    tiny = drawn(LlamaForCausalLM(config(words)), 7)
    never_say(tiny, [*(words.convert_tokens_to_ids(token) for token in SPECIAL), *unseen])
    scores = drawn(LlamaForSequenceClassification(config(words, num_labels=1)), 8)
    classes = drawn(LlamaForSequenceClassification(config(words, num_labels=3)), 9)
    for name, model in (("tiny", tiny), ("tiny-score", scores), ("tiny-classify", classes)):
        model.to(torch.bfloat16).save_pretrained(out / name)
        words.save_pretrained(out / name)
    for seed, name in enumerate(("one", "two"), 1):
        adapter(out / "tiny-adapters" / name, out / "tiny", seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
