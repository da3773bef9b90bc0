"""``build``: from a name, of the catalogue or of code from elsewhere, to a checked, reproducible network."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fedveil.errors import ConfigError, FedVeilError, unknown_name, unknown_option
from fedveil.models.catalogue import (
    CATALOGUE,
    DATA_ARGUMENTS,
    MOST_PARAMETERS,
    OptionValue,
    check_input,
    check_options,
    check_output,
    check_sizes,
    logits_of,
)
from fedveil.own_code import OwnCode, load_callable, refuse_code
from fedveil.secrets import SecretStream, drawn_from

# --- networks from elsewhere

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_factory(
    reference: OwnCode,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """Import the factory and call it with what its signature accepts.

    ``data`` (input_shape, outputs, vocabulary) is passed as far as the factory asks for it; an
    option it does not take is an error, because a setting without effect would mislead.
    """
    return call(load_callable(reference, what="a model"), reference, data=data, options=options)


def call(
    factory: Callable[..., object],
    reference: str,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """Call a factory that the user gave, named `reference` in errors, with what its signature accepts."""
    arguments = _accepted(factory, reference, data=data, options=options)
    try:
        model = factory(**arguments)
    except FedVeilError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Model factory {reference!r}, called with {_shown(arguments)}, raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Model factory {reference!r} returned {model!r}, not a torch.nn.Module.")
    return model


def _accepted(
    factory: Callable[..., object],
    reference: str,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> dict[str, object]:
    """The keyword arguments for the factory, checked against its signature."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Model factory {reference!r} has no readable signature: wrap it in a Python function."
        ) from error
    parameters = signature.parameters.values()
    keywords = {p.name for p in parameters if p.kind in _KEYWORDS}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in keywords:
                raise unknown_option(f"Model {reference!r}", option, sorted(keywords - DATA_ARGUMENTS))
        data = {key: value for key, value in data.items() if key in keywords}
    arguments: dict[str, object] = {**data, **options}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"Model factory {reference!r} takes {signature}, but gets {_shown(arguments)}: {error}. "
            f"Give defaults to its other arguments, or set them as options of the model."
        ) from error
    return arguments


def _shown(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"


class Adapted(nn.Module):
    """A network that takes its inputs by name, or gives an object: as one that takes a tensor and gives logits.

    Args:
        network: The network; its parameters are those of this module, below ``network``.
        fields: Name and shape of each input, in the order they lie in a row of the tensor; none: the tensor is the
            network's first argument. Token ids then bring a mask along, where the network takes an ``attention_mask``
            and its ``config`` says which id is padding.
    """

    def __init__(self, network: nn.Module, fields: Sequence[tuple[str, tuple[int, ...]]] = ()) -> None:
        super().__init__()
        self.network = network
        self.fields = tuple(fields)
        self.padding: int | None = None
        if not fields and "attention_mask" in inputs_of(network):
            self.padding = getattr(getattr(network, "config", None), "pad_token_id", None)
        self.training = network.training

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``(batch, outputs)``."""
        named = {}
        start = 0
        for name, shape in self.fields:
            size = math.prod(shape)
            part = x[:, start : start + size]
            named[name] = part.reshape(-1, *shape)
            start += size
        if self.fields:
            output = self.network(**named)
        elif self.padding is not None and not x.is_floating_point():
            output = self.network(x, attention_mask=x.ne(self.padding))
        else:
            output = self.network(x)
        scores: Tensor = logits_of(output)
        return scores


def inputs_of(network: nn.Module) -> tuple[str, ...]:
    """The names that a network's inputs go by.

    Raises:
        ConfigError: Its forward is compiled code that does not tell.
    """
    try:
        signature = inspect.signature(network.forward)
    except (TypeError, ValueError) as reason:
        raise ConfigError(
            f"What inputs the model {named(network)} takes cannot be read: its forward is compiled, as torch.jit makes "
            "it. Give the nn.Module that it was made from."
        ) from reason
    return tuple(p.name for p in signature.parameters.values() if p.kind in _KEYWORDS)


def named(model: nn.Module) -> str:
    """A model's class as its owner knows it."""
    inner = model.network if isinstance(model, Adapted) else model
    return repr(getattr(inner, "original_name", None) or type(inner).__qualname__)


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks on a model's parameters: gradients are taken without them, so they would silently do nothing.

    What a layer computed from its parameters and keeps (the older `weight_norm` does) is refused as well: roles work on
    copies of the model, and torch copies no such tensor.

    Raises:
        ConfigError: A parameter has one, of `register_hook` or of `register_post_accumulate_grad_hook`.
    """
    for path, layer in model.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise ConfigError(
                    f"{f'{path}.{name}'.lstrip('.')!r} of the model is computed from its parameters and kept, so that "
                    "the model cannot be copied. Compute it in forward; in place of torch.nn.utils.weight_norm take "
                    "torch.nn.utils.parametrizations.weight_norm."
                )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"The parameter {name!r} of the model has a hook on its gradient (register_hook or "
                "register_post_accumulate_grad_hook), which training here never calls. Remove it (handle.remove()): "
                "to keep a parameter as it is, requires_grad_(False); to bound gradients, clip; else change them in "
                "forward."
            )


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse tensors of a model that lie in each other's memory without being one.

    Weights are sent, filled in and copied tensor by tensor: what lies under two names would be written twice, or would
    part when the model is moved. A parameter that several layers hold is one tensor, and fine; so are constants that
    share memory, for they are never written.

    Raises:
        ConfigError: Two parameters, a parameter and a buffer, or the running statistics of two layers do.
    """
    spans: list[tuple[int, int, int, str, bool]] = []
    seen: set[int] = set()
    for path, layer in model.named_modules():
        for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            counted = isinstance(layer, nn.modules.batchnorm._NormBase) and name in ("running_mean", "running_var")
            if (id(tensor) in seen and not counted) or not _lies_somewhere(tensor):
                continue
            seen.add(id(tensor))
            moves = counted or isinstance(tensor, nn.Parameter)
            spans.append((*_span(tensor), f"{path}.{name}" if path else name, moves))
    spans.sort()
    for position, (storage, _, end, name, moves) in enumerate(spans):
        for other_storage, other_start, _, other, also in spans[position + 1 :]:
            if other_storage != storage or other_start >= end:
                break
            if moves or also:
                first, second = sorted((name, other))
                raise ConfigError(
                    f"{first!r} and {second!r} of the model lie in the same memory without being one tensor: trained "
                    "apart, they would not be what they are together. Give one of them memory of its own (.clone()), "
                    "or let both layers hold the same nn.Parameter."
                )


def _lies_somewhere(tensor: Tensor) -> bool:
    return not (is_lazy(tensor) or tensor.is_meta or not tensor.numel())


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The storage that a tensor lies in, and from which byte to which."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    last = start + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), start * size, (last + 1) * size


def plain(network: nn.Module, output: object) -> nn.Module:
    """A network, given what it said of some batch: where that was an object with logits, one that gives these."""
    return network if logits_of(output) is output else Adapted(network)


LIGHT = 1 << 28


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    seed: int | SecretStream = 0,
    vocabulary: int | None = None,
    **options: OptionValue,
) -> nn.Module:
    """Build a model for samples of ``input_shape`` (without the batch) and ``outputs`` numbers each.

    Equal seeds give equal parameters; the global random state is left as it was. Before it is returned
    the model is run on a random batch of two, and a wrong output shape is refused.

    Args:
        name: One of :func:`names`, or code of your own, ``OwnCode("package.module:factory")`` or
            ``OwnCode("path/to/file.py:factory")``; plain text never names code, since it may come from a file.
            A factory gets those of input_shape, outputs, vocabulary that its signature has, and the options.
        input_shape: A sample's shape.
        outputs: Classes, or numbers to predict.
        seed: What draws the parameters. Weights that are to be secret take a secret stream: of a number
            PyTorch keeps 32 bits.
        vocabulary: How many different tokens there are, where samples are token ids.
        options: Those of the model, like ``depth``.

    Returns:
        The model.

    Raises:
        ConfigError: The model or an option is unknown, too large, or does not go with the data.

    >>> build("mlp", input_shape=(8, 8), outputs=10, depth=2)(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])
    """
    input_shape = tuple(input_shape)
    check_sizes(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    with drawn_from(seed) if isinstance(seed, SecretStream) else _seeded(seed):
        if isinstance(name, OwnCode):
            data = {"input_shape": input_shape, "outputs": outputs, "vocabulary": vocabulary}
            model = call_factory(name, data=data, options=options)
            refuse_shared_memory(model)
            refuse_hooks(model)
            said = check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
            model = plain(model, said)
        else:
            parameters_of(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
            if _is_light(model, input_shape):
                check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    return model


def parameters_of(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int | None,
    options: Mapping[str, OptionValue],
) -> int:
    """How many parameters a model of the catalogue has; one that is too large is refused.

    Nothing is allocated for that: names and sizes may come from a file. A model whose outputs would take much memory
    is tried on the data's shape as well, without any.
    """
    check_sizes(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    try:
        with torch.device("meta"), _Undrawn():
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise ConfigError(f"Model {name!r} cannot be built with {dict(options)}: {error}") from error
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST_PARAMETERS:
        raise ConfigError(
            f"Model {name!r} would have {size:,} parameters with {dict(options)}; {MOST_PARAMETERS:,} are the most."
        )
    if not _is_light(model, input_shape):
        check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    return size


def _is_light(model: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether running a model of the catalogue takes little memory.

    A layer has as many channels as its parameters have rows, and no more positions than a sample has numbers. Running
    it without memory is for what may not fit: that loads torch's compiler, which takes a second.
    """
    return sum(len(parameter) for parameter in model.parameters()) * math.prod(input_shape) <= LIGHT


class _Undrawn(TorchFunctionMode):
    """Leaves normal numbers undrawn: without memory there are none, and drawing them loads torch's compiler too."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.normal_:
            return args[0]
        return given["tensor"] if func is nn.init.normal_ else func(*args, **given)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reseed every GPU as well and fork_rng would not undo it.
        torch.default_generator.manual_seed(seed)
        yield


def _named(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int | None,
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """A model of the catalogue, after its inputs and options were checked."""
    refuse_code(name)
    if name not in CATALOGUE:
        hint = "Your own model: package.module:factory or path/to/file.py:factory."
        raise unknown_name("model", name, CATALOGUE, hint=hint)
    entry = CATALOGUE[name]
    check_input(entry, input_shape=input_shape, vocabulary=vocabulary)
    check_options(entry.info, options)
    tokens = {} if vocabulary is None else {"vocabulary": vocabulary}
    return entry.builder(input_shape=input_shape, outputs=outputs, **tokens, **options)
