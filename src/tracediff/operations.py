"""One vocabulary for the operations of all stacks, and which of their arguments are data.

Recorders write the canonical name of an operation next to the stack's own; what the table does not
list keeps its own name. Knows names only, no framework.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

LEAF: Final = "leaf"
"""A value that no recorded operation of the step made: parameter, batch field, constant."""

CONSTANT: Final = "constant"
"""What the leaf of a value is called that no parameter, buffer or argument is."""

ALIAS: Final = "alias"
"""A tensor read again after another view of its memory was written to."""

VIEWS: Final = frozenset(
    {
        *("reshape", "transpose", "expand", "slice", "select", "squeeze", "unsqueeze", "split"),
        *("as_strided", "diagonal", "detach", "view_dtype", "real", "imag", ALIAS),
        *("view_as_real", "view_as_complex"),
    }
)
"""Operations that only look at the same values in another way."""

_TABLE: Final = """
# canonical      pytorch (aten)                                | mlx

# products
matmul           mm bmm matmul mv dot vdot linear              | matmul inner
addmm            addmm baddbmm addmv addbmm                    | addmm
outer            outer ger                                     | outer
einsum           einsum                                        | einsum
convolution      convolution _convolution conv1d conv2d        | conv1d conv2d conv3d conv_general
quantized_matmul                                               | quantized_matmul
gather_matmul    _grouped_mm                                   | gather_mm gather_qmm segmented_mm

# arithmetic, element by element
add              add                                           | add
sub              sub rsub                                      | subtract
mul              mul                                           | multiply
div              div true_divide                               | divide
floor_divide     floor_divide                                  | floor_divide
remainder        remainder fmod                                | remainder
neg              neg                                           | negative
abs              abs                                           | abs
reciprocal       reciprocal                                    | reciprocal
pow              pow                                           | power
square           square                                        | square
sqrt             sqrt                                          | sqrt
rsqrt            rsqrt                                         | rsqrt
exp              exp                                           | exp
exp2             exp2                                          |
expm1            expm1                                         | expm1
log              log                                           | log
log2             log2                                          | log2
log10            log10                                         | log10
log1p            log1p                                         | log1p
logaddexp        logaddexp                                     | logaddexp
sin              sin                                           | sin
cos              cos                                           | cos
tan              tan                                           | tan
arccos           acos                                          | arccos
arcsin           asin                                          | arcsin
arctan           atan                                          | arctan
sinh             sinh                                          | sinh
cosh             cosh                                          | cosh
tanh             tanh                                          | tanh
arctan2          atan2                                         | arctan2
erf              erf                                           | erf
erfinv           erfinv                                        | erfinv
sigmoid          sigmoid                                       | sigmoid
sign             sign sgn                                      | sign
conj             _conj conj_physical                           | conjugate conj
complex          complex                                       |
polar            polar                                         |
floor            floor                                         | floor
ceil             ceil                                          | ceil
trunc            trunc                                         | trunc
round            round                                         | round
maximum          maximum                                       | maximum
minimum          minimum                                       | minimum
clamp            clamp clamp_min clamp_max clip                | clip
where            where masked_fill                             | where
lerp             lerp                                          |
addcmul          addcmul                                       |
addcdiv          addcdiv                                       |
logical_not      logical_not bitwise_not                       | logical_not bitwise_invert
logical_and      logical_and bitwise_and                       | logical_and bitwise_and
logical_or       logical_or bitwise_or                         | logical_or bitwise_or
logical_xor      logical_xor bitwise_xor                       | bitwise_xor
equal            eq                                            | equal
not_equal        ne                                            | not_equal
less             lt                                            | less
less_equal       le                                            | less_equal
greater          gt                                            | greater
greater_equal    ge                                            | greater_equal
isnan            isnan                                         | isnan
isinf            isinf                                         | isinf
isfinite         isfinite                                      | isfinite
nan_to_num       nan_to_num                                    | nan_to_num

# activations
relu             relu                                          | relu
silu             silu                                          | silu
gelu             gelu                                          | gelu gelu_approx
swiglu                                                         | swiglu precise_swiglu
leaky_relu       leaky_relu                                    | leaky_relu
softplus         softplus                                      | softplus
log_sigmoid      log_sigmoid_forward                           | log_sigmoid
elu              elu                                           | elu
hardswish        hardswish                                     | hardswish
hardtanh         hardtanh                                      | hard_tanh
mish             mish                                          | mish
softshrink       softshrink                                    | softshrink
softmax          _softmax softmax _safe_softmax                | softmax
log_softmax      _log_softmax log_softmax                      | log_softmax
dropout          native_dropout dropout                        |

# reductions
sum              sum                                           | sum
mean             mean                                          | mean
prod             prod                                          | prod
var              var                                           | var
std              std                                           | std
max              max amax                                      | max
min              min amin                                      | min
argmax           argmax                                        | argmax
argmin           argmin                                        | argmin
any              any                                           | any
all              all                                           | all
logsumexp        logsumexp                                     | logsumexp
norm             norm linalg_vector_norm                       | norm
cumsum           cumsum                                        | cumsum
cumprod          cumprod                                       | cumprod
cummax           cummax                                        | cummax
cummin           cummin                                        | cummin
logcumsumexp     logcumsumexp                                  | logcumsumexp
sort             sort                                          | sort
searchsorted     searchsorted                                  | searchsorted
argsort          argsort                                       | argsort
topk             topk                                          | topk
argpartition                                                   | argpartition
partition                                                      | partition

# fused
rms_norm         rms_norm _fused_rms_norm                      | rms_norm
layer_norm       native_layer_norm layer_norm                  | layer_norm
group_norm       native_group_norm group_norm                  |
batch_norm       native_batch_norm batch_norm                  |
rope                                                           | rope
attention        scaled_dot_product_attention                  | scaled_dot_product_attention
embedding        embedding                                     |
nll_loss         nll_loss_forward nll_loss2d_forward           |
mse_loss         mse_loss                                      |
adamw            _fused_adamw _fused_adam                      |

# indexing
take             index_select                                  | take
take_along_axis  gather take_along_dim                         | take_along_axis
index            index                                         |
slice            slice narrow                                  | slice
select           select                                        |
scatter          scatter scatter_add index_put index_copy      | put_along_axis
index_add        index_add                                     |
slice_update     slice_scatter select_scatter                  | slice_update setitem

# layout
reshape          view reshape _unsafe_view _reshape_alias      | reshape flatten unflatten
transpose        t transpose permute           | transpose swapaxes moveaxis permute_dims
expand           expand broadcast_to                           | broadcast_to
squeeze          squeeze                                       | squeeze
unsqueeze        unsqueeze                                     | expand_dims atleast_1d atleast_2d
concatenate      cat                                           | concatenate concat
stack            stack                                         | stack
split            split split_with_sizes unsafe_split chunk unbind tensor_split | split
repeat           repeat repeat_interleave                      | repeat
tile             tile                                          | tile
pad              constant_pad_nd                               | pad
flip             flip                                          | flip
roll             roll                                          | roll
tril             tril                                          | tril
triu             triu                                          | triu
diagonal         diagonal                                      | diagonal
trace            trace                                         | trace
as_strided       as_strided                                    | as_strided
copy             clone copy contiguous                         | contiguous
cast             _to_copy to                                   | astype
view_dtype                                                     | view
view_as_real     view_as_real                                  |
view_as_complex  view_as_complex                               |
real             real                                          | real
imag             imag                                          | imag
detach           detach alias                                  | stop_gradient

# creation
zeros            zeros zeros_like new_zeros zero               | zeros zeros_like
ones             ones ones_like new_ones                       | ones ones_like
full             full full_like new_full fill scalar_tensor    | full full_like
arange           arange linspace                               | arange linspace
eye              eye                                           | eye identity
tri              tril_indices triu_indices                     | tri
one_hot          one_hot                                       |
random_normal    randn normal randn_like                       | random.normal
random_uniform   rand uniform rand_like                        | random.uniform
bernoulli        bernoulli                                     | random.bernoulli
random_integer   randint random randint_like                   | random.randint
permutation      randperm                                      | random.permutation
categorical      multinomial                                   | random.categorical

# quantization
quantize                                                       | quantize
dequantize                                                     | dequantize

# gradients of fused operations
silu_backward            silu_backward                         |
gelu_backward            gelu_backward                         |
sigmoid_backward         sigmoid_backward                      |
tanh_backward            tanh_backward                         |
relu_backward            threshold_backward                    |
softmax_backward         _softmax_backward_data                |
log_softmax_backward     _log_softmax_backward_data            |
layer_norm_backward      native_layer_norm_backward            |
rms_norm_backward        _fused_rms_norm_backward              |
embedding_backward       embedding_dense_backward              |
nll_loss_backward        nll_loss_backward nll_loss2d_backward |
mse_loss_backward        mse_loss_backward                     |
slice_backward           slice_backward select_backward        |
convolution_backward     convolution_backward                  |
"""

_STACKS: Final = ("pytorch", "mlx")
_MLX_PACKAGES: Final = frozenset({"mlx", "mlx_lm", "mlx_vlm"})

_ATTENTION: Final = re.compile(r"_?scaled_dot_product_(?:\w+_)?attention(?:_for_cpu|_math|)$")
_ATTENTION_BACKWARD: Final = re.compile(r"_?scaled_dot_product_\w+_backward$")

_SCALAR_OPERANDS: Final = frozenset(
    {
        *("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "maximum", "minimum"),
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "arctan2"),
        *("where", "clamp", "lerp", "addcmul", "addcdiv", "full", "matmul", "logaddexp"),
        *("logical_and", "logical_or", "logical_xor"),
    }
)
"""Operations whose numbers are operands, as tensors would be, and no attributes."""


def _read(table: str) -> Mapping[str, Mapping[str, str]]:
    names: dict[str, dict[str, str]] = {stack: {} for stack in _STACKS}
    for line in table.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        canonical, _, rest = line.partition(" ")
        for stack, column in zip(_STACKS, rest.split("|"), strict=True):
            for own in column.split():
                names[stack][own] = canonical
    return names


_NAMES: Final = _read(_TABLE)


@lru_cache(maxsize=4096)
def base_name(stack: str, name: str) -> str:
    """What an operation is called without namespace, overload and mark of an in-place variant.

    `aten._foreach_add_.List` -> `add`, `mlx.fast.rms_norm` -> `rms_norm`,
    `mylib.fused.default` -> `mylib.fused`.
    """
    if stack == "mlx":
        package, own = name.partition(".")[0], name.rpartition(".")[2]
        if package not in _MLX_PACKAGES:
            return name
        return f"random.{own}" if name.startswith("mlx.random.") else own
    namespace, _, rest = name.partition(".")
    own = rest.partition(".")[0]
    if own.endswith("_") and not own.endswith("__"):
        own = own[:-1]
    own = own.removeprefix("_foreach_")
    return own if namespace == "aten" else f"{namespace}.{own}" if own else namespace


@lru_cache(maxsize=4096)
def canonical_operation(stack: str, name: str) -> str:
    """The canonical name of an operation, or its own base name where the table has none.

    Args:
        stack: `pytorch` or `mlx`; other stacks are taken to use canonical names.
        name: The stack's name: `aten.mul.Tensor`, `mlx.fast.rms_norm`.
    """
    base = base_name(stack, name)
    if _ATTENTION.fullmatch(base):
        return "attention"
    if _ATTENTION_BACKWARD.fullmatch(base):
        return "attention_backward"
    return _NAMES.get(stack, {}).get(base, base)


def takes_scalar_operands(canonical: str) -> bool:
    """Whether a number given to the operation stands for a tensor (`x * 2`)."""
    return canonical in _SCALAR_OPERANDS
