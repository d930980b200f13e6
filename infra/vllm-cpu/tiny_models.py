"""Makes the models that the tests of the vLLM engine serve: ``tiny_models.py FOLDER``. Random weights, real formats.

``tiny``: a two-layer Llama with a byte-level BPE tokenizer and a chat template that spells tools the Hermes way and
knows ``<think>``. ``tiny-adapters/{one,two}``: LoRA adapters for it. ``tiny-score``: the same body with one score for
a head, for rerank. ``tiny-classify``: the same with three classes.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

VOCABULARY = 2048
CONTEXT = 8192
HIDDEN = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
RANK = 8
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
    """Trained on the standard library, which every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))[:80]]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(MARKS), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
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
        # Wide weights keep the logits apart, so that the order of a sum changes no choice at temperature 0
        "initializer_range": 0.3,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return LlamaConfig(**{**values, **other})


def adapter(folder: Path, base: Path, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = {}
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", head * KV_HEADS)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, HIDDEN) * 0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(width, RANK) * 0.5
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
    torch.manual_seed(7)
    LlamaForCausalLM(config(words)).to(torch.bfloat16).save_pretrained(out / "tiny")
    words.save_pretrained(out / "tiny")
    for seed, name in enumerate(("one", "two"), 1):
        adapter(out / "tiny-adapters" / name, out / "tiny", seed)
    torch.manual_seed(8)
    scores = LlamaForSequenceClassification(config(words, num_labels=1)).to(torch.bfloat16)
    scores.save_pretrained(out / "tiny-score")
    words.save_pretrained(out / "tiny-score")
    torch.manual_seed(9)
    classes = LlamaForSequenceClassification(config(words, num_labels=3)).to(torch.bfloat16)
    classes.save_pretrained(out / "tiny-classify")
    words.save_pretrained(out / "tiny-classify")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
