"""Tokens of a Llama of random weights by Hugging Face's `generate`, with weights in fp32 and as codes.

    python examples/benchmarks/generate.py                           # ten minutes
    python examples/benchmarks/generate.py --layers 2 --width 256 --ways "fp32" "zgraph, 4 bits"      # does it run?

Each way runs in a process of its own, on two threads, with a static cache, after a run that compiles. Peers are used as
their pages say, compiled by torch.compile; those that are not installed (torchao, optimum-quanto, llama-cpp-python
with gguf) are left out. The weights of zgraph are on the host or on disk; the time to read the same bytes from the
disk is measured before.
Tokens are not compared: 4-bit weights choose other ones. tests/integrations/test_generate.py compares those of equal
weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from offload_inference import disk_rate
from ranks import alone
from record import about, parser_of, quartiles, save
from transformers import LlamaConfig, LlamaForCausalLM

import zgraph

PROMPT, TOKENS, VOCABULARY = 16, 48, 8192
BATCHES = (1, 8)
OF_ZGRAPH: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "zgraph, 8 bits": {"params": "host", "param_bits": 8},
        "zgraph, 4 bits": {"params": "host", "param_bits": 4},
        "zgraph, 4 bits on disk": {"params": "disk", "param_bits": 4},
    }
)


def torchao_ints(model: LlamaForCausalLM) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore

    quantize_(model, Int8WeightOnlyConfig())


def quanto_ints(bits: int) -> Callable[[LlamaForCausalLM], None]:
    def convert(model: LlamaForCausalLM) -> None:
        from optimum import quanto  # pyright: ignore

        quanto.quantize(model, weights=quanto.qint4 if bits == 4 else quanto.qint8)
        quanto.freeze(model)

    return convert


PEERS: MappingProxyType[str, tuple[str, Callable[[LlamaForCausalLM], None]]] = MappingProxyType(
    {
        "fp32": ("torch", lambda model: None),
        "bf16": ("torch", lambda model: model.bfloat16() and None),
        "torchao, 8 bits": ("torchao", torchao_ints),
        "quanto, 8 bits": ("optimum", quanto_ints(8)),
        "quanto, 4 bits": ("optimum", quanto_ints(4)),
    }
)
OF_LLAMA_CPP: MappingProxyType[str, str] = MappingProxyType(
    {"llama.cpp, 8 bits": "Q8_0", "llama.cpp, 4 bits": "Q4_0"}  # names of its formats
)


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def write_gguf(model: LlamaForCausalLM, kind: str, path: str) -> None:
    """Write a Llama in the file format of llama.cpp, with matrices in one of its formats and without a tokenizer."""
    import gguf  # pyright: ignore

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    heads: Any = config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        values = value.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbours, not halves
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        array = values.contiguous().numpy()
        as_kind = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        base = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(base, gguf.quants.quantize(array, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_llama_cpp(way: str, model: LlamaForCausalLM, turns: int, scratch: str) -> dict[str, Any]:
    """Measure tokens of one text by llama.cpp; it generates one text at a time in this interface."""
    from llama_cpp import Llama  # pyright: ignore

    path = os.path.join(scratch, "model.gguf")
    write_gguf(model, OF_LLAMA_CPP[way], path)
    row: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    row["stored_mb"] = os.path.getsize(path) / 1e6
    other: Any = Llama(path, n_ctx=256, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False)
    prompt = torch.randint(VOCABULARY - 1, (PROMPT,)).tolist()

    def run(tokens: int) -> float:
        began = time.perf_counter()
        other.reset()
        other.eval(prompt)
        for _ in range(tokens - 1):
            other.eval([int(other.scores[other.n_tokens - 1].argmax())])
        return 1e3 * (time.perf_counter() - began)

    row["first_s_1"] = run(TOKENS) / 1e3
    row["ms_1"] = quartiles([(run(TOKENS) - run(1)) / (TOKENS - 1) for _ in range(turns)])
    row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def serve(way: str, layers: int, width: int, turns: int, scratch: str) -> dict[str, Any]:
    """Measure one way, in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=0,
        eos_token_id=VOCABULARY - 1, dtype=torch.float32,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    if way in OF_LLAMA_CPP:
        return serve_llama_cpp(way, model, turns, scratch)
    row: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    if way in OF_ZGRAPH:
        on_disk = OF_ZGRAPH[way]["params"] == "disk"
        rate = disk_rate(scratch) if on_disk else None
        zgraph.shard(model, offload=zgraph.Offload(**OF_ZGRAPH[way], path=scratch if on_disk else None))
        row["stored_mb"] = sum(one.to_local().nbytes for one in model.parameters()) / 1e6
        row["ms_to_read"] = None if rate is None else 1e9 * row["stored_mb"] / rate
        model.forward = torch.compile(model.forward, backend="zgraph", options={"lowering": "fx"})
    else:
        PEERS[way][1](model)
        model.forward = torch.compile(model.forward)
    for batch in BATCHES:
        prompts = torch.randint(VOCABULARY - 1, (batch, PROMPT))

        def run(tokens: int, prompts: torch.Tensor = prompts) -> float:
            began = time.perf_counter()
            model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, cache_implementation="static",
                max_new_tokens=tokens, min_new_tokens=tokens,
            )  # fmt: skip
            return 1e3 * (time.perf_counter() - began)

        row[f"first_s_{batch}"] = run(TOKENS) / 1e3
        run(TOKENS)
        # Of a token after the prompt: what more tokens take longer.
        row[f"ms_{batch}"] = quartiles([(run(TOKENS) - run(1)) / (TOKENS - 1) for _ in range(turns)])
    row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def main() -> int:
    peers = {way: module for way, (module, _) in PEERS.items()} | dict.fromkeys(OF_LLAMA_CPP, "llama_cpp")
    ways = [*(way for way, module in peers.items() if importlib.util.find_spec(module)), *OF_ZGRAPH]
    parser = parser_of(__doc__, layers=12, width=1024, turns=5)
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        with tempfile.TemporaryDirectory(dir=".") as scratch, alone(), torch.no_grad():
            print(json.dumps(serve(options.way, options.layers, options.width, options.turns, scratch)))
        return 0
    facts, rows = about(), list[dict[str, Any]]()
    for way in options.ways:
        sizes = ["--layers", str(options.layers), "--width", str(options.width), "--turns", str(options.turns)]
        command = [sys.executable, __file__, "--way", way, *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
        if done.returncode:
            print(f"{way}: failed with {done.returncode}", file=sys.stderr)
            continue
        rows.append({"way": way, **json.loads(done.stdout.splitlines()[-1])})
        print(rows[-1], flush=True)
    save(options.json, facts | {"tokens": TOKENS, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
