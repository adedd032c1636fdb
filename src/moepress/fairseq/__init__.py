"""Meta's GPT-like language models from fairseq, dense and with 512 experts a layer, as a model of transformers, which
has none for them (https://arxiv.org/abs/2112.10684). It is known to the Auto classes once moepress is imported.

Only safetensors are read: a checkpoint of fairseq is a pickle, and reading one runs what is in it.
"""
