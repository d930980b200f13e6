"""Makes a model of real size for ``bench.gpu``: a Llama of 8B's shape with random weights, 14 GB in bfloat16.

    FOLDER/bin/python infra/vllm-cpu/large_model.py FOLDER/models/llama [--layers 32]

Its speed is a real model's, its text is noise. The vocabulary is the small one of the tests' models. Runs in vLLM's
environment, and draws the weights on a GPU where there is one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import VOCABULARY, config, tokenizer

HIDDEN = 4096
INNER = 14336
HEADS = 32
KV_HEADS = 8
CONTEXT = 32768
DEVIATION = 0.02


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    head, kv = HIDDEN, HIDDEN * KV_HEADS // HEADS
    attention = {"q_proj": (head, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN), "o_proj": (HIDDEN, head)}
    mlp = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    at = f"model.layers.{layer}"
    return {
        **{f"{at}.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"{at}.mlp.{name}.weight": shape for name, shape in mlp.items()},
        f"{at}.input_layernorm.weight": (HIDDEN,),
        f"{at}.post_attention_layernorm.weight": (HIDDEN,),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="large_model.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    words.model_max_length = CONTEXT
    words.save_pretrained(args.folder)
    config(
        words,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rope_theta=500_000.0,
        initializer_range=DEVIATION,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(args.folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rest = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    rest["model.norm.weight"] = (HIDDEN,)
    files = [rest, *(layer_shapes(layer) for layer in range(args.layers))]
    for number, shapes in enumerate(files, 1):
        tensors = {
            name: (
                torch.ones(shape, dtype=torch.bfloat16)
                if len(shape) == 1
                else (torch.randn(shape, device=device) * DEVIATION).to(torch.bfloat16).cpu().contiguous()
            )
            for name, shape in shapes.items()
        }
        save_file(tensors, str(args.folder / f"model-{number:05}-of-{len(files):05}.safetensors"), {"format": "pt"})


if __name__ == "__main__":
    main()
