"""llama.cpp's converter on a checkpoint with the demonstration's tokenizer: LLAMA_CPP_FOLDER CHECKPOINT OUT.gguf.

The converter knows tokenizers by a checksum of what they make of a text, and refuses others. This one splits text as
GPT-2's does. Nothing else of it is touched.
"""

import sys
from pathlib import Path

folder, checkpoint, out = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", "f32"]

import convert_hf_to_gguf  # noqa: E402
from conversion import base  # noqa: E402

base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
assert Path(convert_hf_to_gguf.__file__).parent == Path(folder)
convert_hf_to_gguf.main()
