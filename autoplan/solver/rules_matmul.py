"""Rows of the rule table for products: matmuls, convolutions, attention, embeddings.

Letters: k is summed over, o and n are columns and rows of the result, v counts the vocabulary.
"""

from autoplan.solver.rules_einsum import (
    Einsum,
    Letters,
    Rule,
    Use,
    broadcast,
    known_letters,
    linear_in_each,
    names,
)


def _linear(use: Use) -> Einsum:
    rows = names("n", len(use.inputs[0].shape) - 1)
    out: Letters = ("o",) if len(use.inputs[1].shape) == 2 else ()
    has_bias = len(use.inputs) == 3
    return Einsum(
        inputs=((*rows, "k"), (*out, "k"), *((out,) if has_bias else ())),
        outputs=((*rows, *out),),
        linear=(frozenset({0, 2}) if has_bias else frozenset({0}),),
        bias=frozenset({2}) if has_bias else frozenset(),
        blocks=known_letters(out),
    )


def _addmm(use: Use) -> Einsum:
    """``addmm(bias, x, weight)`` and ``baddbmm``: the bias is broadcast to the result."""
    batch = names("b", len(use.outputs[0].shape) - 2)
    result = (*batch, "n", "o")
    return Einsum(
        inputs=(
            broadcast(result, use.outputs[0].shape, use.inputs[0].shape),
            (*batch, "n", "k"),
            (*batch, "k", "o"),
        ),
        outputs=(result,),
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        bias=frozenset({0}),
        blocks=frozenset({"o"}),
    )


def _matmul(use: Use) -> Einsum:
    """``mm``, ``bmm`` and ``matmul`` with vectors and with broadcast batch dims."""
    left, right = (meta.shape for meta in use.inputs)
    rows: Letters = ("n",) if len(left) > 1 else ()
    columns: Letters = ("o",) if len(right) > 1 else ()
    sizes = use.outputs[0].shape[: len(use.outputs[0].shape) - len(rows) - len(columns)]
    batch = names("b", len(sizes))
    return Einsum(
        inputs=(
            (*broadcast(batch, sizes, left[:-2]), *rows, "k"),
            (*broadcast(batch, sizes, right[:-2]), "k", *columns),
        ),
        outputs=((*batch, *rows, *columns),),
        linear=linear_in_each(2),
        blocks=frozenset({"o"}),
    )


def _einsum(use: Use) -> Einsum:
    """An equation without ellipsis and without a letter twice in one tensor; others run whole."""
    equation = use.arg(0, "equation")
    assert isinstance(equation, str)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = [tuple(term) for term in left.split(",")]
    plain = "->" in equation and "." not in equation and all(len(set(t)) == len(t) for t in (*terms, tuple(right)))
    if not plain:
        return _whole(use)
    return Einsum(inputs=tuple(terms), outputs=(tuple(right),), linear=linear_in_each(len(terms)))


def _whole(use: Use) -> Einsum:
    def blank(shape: tuple[int, ...]) -> Letters:
        return (None,) * len(shape)

    return Einsum(
        inputs=tuple(blank(meta.shape) for meta in use.inputs), outputs=tuple(blank(meta.shape) for meta in use.outputs)
    )


def _convolution(use: Use) -> Einsum:
    """Channels may be split when there are no groups; places never, as windows overlap."""
    space: Letters = (None,) * (len(use.inputs[1].shape) - 2)
    samples: Letters = ("n",) if len(use.inputs[0].shape) == len(use.inputs[1].shape) else ()
    dense = use.integer(6, "groups", 1) == 1
    k, o = ("k", "o") if dense else (None, None)
    has_bias = len(use.inputs) == 3
    return Einsum(
        inputs=((*samples, k, *space), (o, k, *space), *(((o,),) if has_bias else ())),
        outputs=((*samples, o, *space),),
        linear=(frozenset({0, 2}) if has_bias else frozenset({0}),),
        bias=frozenset({2}) if has_bias else frozenset(),
    )


def _attention(use: Use) -> Einsum:
    """Query ``[..., h, l, e]``, key ``[..., h, s, e]``. A head is never split, nor are keys.

    Fewer key heads than query heads need both numbers to divide; a single key head is shared by all ranks.
    Queries may be split only where no causal mask hangs on their position.
    """
    query = use.inputs[0].shape
    batch = names("b", len(query) - 3)
    rows = None if use.arg(5, "is_causal", False) else "l"
    heads: Letters = ("h",) if len(query) > 2 else ()
    lead, lead_sizes = (*batch, *heads), query[:-2]

    def pair(shape: tuple[int, ...]) -> Letters:
        letters = broadcast(lead, lead_sizes, shape[:-2])
        return (*letters, None, None)

    inputs: list[Letters] = [(*lead, rows, None), pair(use.inputs[1].shape), pair(use.inputs[2].shape)]
    if len(use.inputs) == 4:
        keys = use.inputs[1].shape[-2]
        inputs.append(broadcast((*lead, rows, None), (*query[:-1], keys), use.inputs[3].shape))
    return Einsum(inputs=tuple(inputs), outputs=((*lead, rows, None),), exact=frozenset({"h"}))


def _embedding(use: Use) -> Einsum:
    """Rows of the table (the vocabulary) are split with a local form, columns plainly."""
    index = names("n", len(use.inputs[1].shape))
    if use.arg(3, "scale_grad_by_freq", False):  # counts over all indices, so these and the rows stay together
        whole: Letters = (None,) * len(index)
        return Einsum(inputs=((None, "o"), whole), outputs=((*whole, "o"),))
    return Einsum(
        inputs=(("v", "o"), index),
        outputs=((*index, "o"),),
        linear=(frozenset({0}),),
        forms=(("v", "embedding_vocab"),),
    )


MATMULS: dict[str, Rule] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.mv.default": _matmul,
    "aten.dot.default": _matmul,
    "aten.matmul.default": _matmul,
    "aten.einsum.default": _einsum,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.embedding.default": _embedding,
}
