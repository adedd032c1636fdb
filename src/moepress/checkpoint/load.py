"""Load a model and its tokenizer from a folder or the Hub; every failure is one sentence."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moepress.checkpoint.files import TensorFiles
from moepress.checkpoint.folder import check_checkpoint, read_json
from moepress.checkpoint.headers import Header
from moepress.checkpoint.hub import download, first_line
from moepress.checkpoint.paging import PagedWeights, weights_stay_in_files
from moepress.checkpoint.quantised import storage_of
from moepress.checkpoint.quantised.files import QuantisedFiles
from moepress.checkpoint.quantizer import METHOD, shape_compact
from moepress.errors import MoepressError
from moepress.models.find import repair
from moepress.models.weights import MARK, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges", "source.spm")
COMPACT_ALREADY = "this model is a compact one already: compress the model that it was made from"
MOST_LAYERS = 10_000
AnyPath = str | os.PathLike[str]


@contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Silence the progress bars and logs of transformers."""
    from transformers.utils import logging

    if verbose:
        yield
        return
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def local_folder(source: AnyPath, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a checkpoint; one that is named by its Hub id is downloaded first."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    name = os.fspath(source)
    if name.count("/") > 1 or name.startswith((".", "~", "/")) or (os.sep != "/" and os.sep in name):
        raise MoepressError(f"{path} does not exist")
    return download(name, revision, weights)


def load_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise MoepressError(f"{folder} is not a model: it has no config.json")
    if odd := too_deep(read_json(folder / "config.json")):
        raise MoepressError(f"the config.json in {folder} is not understood: {odd} is more layers than any model has")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise MoepressError(f"the config.json in {folder} is not understood: {first_line(error)}") from error


def too_deep(config: Any) -> str | None:
    """An entry that asks for so many layers that making them would never end."""
    for key, value in config.items():
        if "layers" in key and isinstance(value, (int, float)) and value > MOST_LAYERS:
            return f"{key}={value:g}"
        if isinstance(value, dict) and (found := too_deep(value)):
            return found
    return None


def load_skeleton(source: AnyPath, *, trust_remote_code: bool = False, revision: str | None = None) -> PreTrainedModel:
    """The model without its weights, on the meta device; a compact one has its compact shapes, and a quantised one
    those of its unpacked weights."""
    config = load_config(local_folder(source, revision, weights=False), trust_remote_code)
    if quantization_method(config) not in (None, METHOD):
        take_quantization(config)
    loader = model_class(config)
    dtype = config.dtype or torch.float32
    try:
        with quiet(), torch.device("meta"):
            model = loader._from_config(config, dtype=dtype) if hasattr(loader, "_from_config") else None
            model = model or loader.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise MoepressError(f"{source} cannot be built: {first_line(error)}") from error
    if quantization_method(config) == METHOD:
        shape_compact(model, config.quantization_config)
    return model.eval()


def open_files(header: Header, config: PreTrainedConfig, source: AnyPath) -> TensorFiles:
    """The tensors of a checkpoint. Where they are quantised, as if they were not; the config says so no more then."""
    method = quantization_method(config)
    if method in (None, METHOD):
        return TensorFiles(header)
    storage = storage_of(quantization_of(config), source)
    unpacked = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    config.dtype = unpacked
    return QuantisedFiles(header, storage, unpacked, take_quantization(config))


def refuse_quantised(source: AnyPath, trust_remote_code: bool = False, revision: str | None = None) -> None:
    """Where the whole model is worked on in memory, what is written from there is not quantised."""
    method = quantization_method(load_config(local_folder(source, revision, weights=False), trust_remote_code))
    if method not in (None, METHOD):
        raise MoepressError(
            f"{source} is quantised with {method}, and gradients or decomposition need it whole and unpacked: use "
            "another method, or give the checkpoint in its original precision"
        )


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MoepressError(f"device {name!r} is none that torch knows: use cpu or cuda, or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MoepressError(f"device {name!r} cannot be used: torch sees no CUDA device here; use cpu")
    return device


def load_model(
    source: AnyPath,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    verbose: bool = False,
    paged: bool = False,
) -> PreTrainedModel:
    """Load a plain or compact model in its own class. Nothing may be missing: no weight is ever random.

    `paged`: its weights stay in the files until they are needed, see `paging.py`. A quantised model is unpacked.
    """
    folder = local_folder(source, revision)
    header = check_checkpoint(folder)
    config = load_config(folder, trust_remote_code)
    if paged and quantization_method(config) == METHOD:
        raise MoepressError(COMPACT_ALREADY)
    files = open_files(header, config, source)
    by_ourselves = paged or isinstance(files, QuantisedFiles)
    loader = model_class(config)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    if device is not None:
        options["device_map"] = {"": _device(device)}
    if trust_remote_code:
        options["trust_remote_code"] = True
    try:
        with quiet(verbose), weights_stay_in_files(files) if by_ourselves else nullcontext():
            model, info = loader.from_pretrained(folder, config=config, **options)
    except (MoepressError, MemoryError, KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise MoepressError(f"{source} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise MoepressError(f"{source} is incomplete: {missing[0]} is missing ({len(missing)} tensors in all)")
    if by_ourselves:
        weights = Weights.of(model)
        assert isinstance(weights, PagedWeights)
        weights.settle()
        files.check({name for part in weights.parts for name in part.names()})
        if not paged:
            weights.load([name for part in weights.parts for name in part.targets])
            del model.__dict__[MARK]
            files.close()
            what = f"{source} is quantised ({files.description}) and unpacked in memory"
            warnings.warn(f"{what}: what is saved from there is not quantised", stacklevel=2)
    for reason in repair(model):
        warnings.warn(reason, stacklevel=2)
    return model


def load_tokenizer(
    source: AnyPath, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    folder = local_folder(source, revision)
    if not any(file.name.startswith(TOKENIZER_FILES) for file in folder.iterdir()):
        # transformers would make an empty tokenizer out of the config
        raise MoepressError(f"{source} has no tokenizer files")
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise MoepressError(f"{source} has no tokenizer that can be loaded: {first_line(error)}") from error


def model_class(config: PreTrainedConfig) -> Any:
    """The class that wrote the checkpoint, or an Auto class for code that comes with it."""
    import transformers

    name = (config.architectures or [""])[0]
    native = getattr(transformers, name, None) if name else None
    if native is not None and hasattr(native, "from_pretrained") and not getattr(config, "auto_map", None):
        return native
    if name.endswith("ForConditionalGeneration") and not config.is_encoder_decoder:
        return transformers.AutoModelForImageTextToText
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModel if name.endswith("Model") else transformers.AutoModelForCausalLM


def quantization_method(config: PreTrainedConfig) -> str | None:
    quantization = quantization_of(config)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return getattr(method, "value", method)


def quantization_of(config: PreTrainedConfig) -> Any:
    """What a config says about it, in the place that transformers reads or in that of the text model."""
    return next((found for _, holder in _holders(config) if (found := _said(holder))), {})


def take_quantization(config: PreTrainedConfig) -> dict[str, Any]:
    """Take it out of a config; as config.json has it, in its place there."""
    found: dict[str, Any] = {}
    for place, holder in _holders(config):
        if said := _said(holder):
            found |= {place: {"quantization_config": said}} if place else {"quantization_config": said}
            del holder.quantization_config
    return found


def _holders(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    text = getattr(config, "text_config", None)
    return [("", config)] if text is None else [("", config), ("text_config", text)]


def _said(holder: Any) -> Any:
    return getattr(holder, "quantization_config", None)
