"""Nodes of torch's graphs: what each makes of what it takes."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"Backward\d+$")  # functions of users have none

GIVE_ON = {
    *("Add", "Alias", "Cat", "Clone", "Copy", "Expand", "MaskedFill", "Mean", "NanToNum", "Nansum"),
    *("Neg", "Permute", "Repeat", "Reshape", "ReshapeAlias", "Split", "Squeeze", "Stack", "Sub"),
    *("Sum", "T", "ToCopy", "Trace", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    "Where",
}
"""Linear in all that they take."""

PRODUCTS = {"Addmm", "Addmv", "Baddbmm", "Bmm", "Div", "Dot", "Mm", "Mul", "Mv"}
"""Linear in each factor, if the others are numbers. What is added counts as a factor, too."""

_MEANS = {"KlDiv", "NllLoss", "NllLoss2D"}
"""Losses that are linear in what has a gradient."""

_LOSSES = {
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "MseLoss"),
    *("SmoothL1Loss", "SoftMarginLoss"),
}
"""Others; all are means or sums over elements."""

SUMS = {"Bmm", "Dot", "Mean", "Mm", "Mv", "Nansum", "Sum", *_MEANS, *_LOSSES}
"""What may take a dimension away, and is a sum over it."""

_BY_NAME = (
    "Abs Acos Asin Atan Celu Cos Cosh Elu Erf Exp Expm1 Gelu Hypot Log Log10 Log1p Log2 Logaddexp "
    "LogSigmoid Logsumexp Mish Relu Rsqrt Sigmoid Silu Sin Sinh Softplus Sqrt Tan Tanh Xlogy"
)
FUNCTIONS = {
    **{name: name.lower() for name in _BY_NAME.split()},
    **dict.fromkeys(("LinalgCholeskyEx", "LinalgInvEx", "LinalgSolveEx"), "an inverse"),
    **dict.fromkeys(("LinalgDet", "LinalgSlogdet"), "a determinant"),
    **dict.fromkeys(("LinalgEig", "LinalgEigh", "LinalgSvd"), "eigenvalues"),
    **dict.fromkeys(("Clamp", "ClampMax", "ClampMin", "Maximum", "Minimum"), "a limit"),
    **dict.fromkeys(("LinalgVectorNorm", "Norm"), "a norm"),
    **dict.fromkeys(("LogSoftmax", "Softmax"), "softmax"),
    **dict.fromkeys(_LOSSES, "a loss"),
    "Pow": "a power",
    "Reciprocal": "1 / x",
    "SpecialEntr": "an entropy",
}
"""What is not linear, and the name of it for people."""

OF_ALL = {
    **dict.fromkeys(("Amax", "Max"), "the maximum"),
    **dict.fromkeys(("Amin", "Min"), "the minimum"),
    **dict.fromkeys(("LinalgVectorNorm", "Norm"), "a norm"),
    **dict.fromkeys(("Median", "Nanmedian", "Kthvalue"), "a quantile"),
    **dict.fromkeys(("Std", "StdMean", "Var", "VarMean"), "the variance"),
    "Logsumexp": "logsumexp",
    "Prod": "the product",
    "Topk": "the largest ones",
}
"""What may take a dimension away, and is no sum over it."""

ALONG = {
    **dict.fromkeys(("LogSoftmax", "Softmax"), "softmax"),
    "Cumprod": "a running product",
    "Cumsum": "a running sum",
    "Flip": "another order",
    "Logcumsumexp": "a running sum",
    "Roll": "another order",
    "Sort": "another order",
}
"""What keeps all dimensions, and mixes what lies along one; by `_saved_dim` or `_saved_dims`."""

MEETINGS = {*PRODUCTS, "Add", "Cdist", "EuclideanDist", "Expand", "Maximum", "Minimum", "Sub"}
"""Where every sample may come together with every other."""

OF_PARAMETERS = {
    *("Abs", "Add", "Alias", "Cat", "Clamp", "Clone", "Div", "Exp", "Expm1", "LinalgVectorNorm"),
    *("Log", "Log1P", "Mean", "Mul", "Neg", "Norm", "Pow", "Reciprocal", "Relu", "Reshape"),
    *("ReshapeAlias", "Rsqrt", "Rsub", "Sigmoid", "Softplus", "Sqrt", "Squeeze", "Stack", "Sub"),
    *("Sum", "T", "Tanh", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
}
"""What penalties are made of. It takes nothing from elsewhere, but for what is added to it."""


def name_of(node: Any) -> str:
    """The name of a node, without what all of torch's end with.

    Example:
        >>> import torch
        >>> name_of(torch.ones(2, requires_grad=True).exp().grad_fn)
        'Exp'
    """
    return _NUMBER.sub("", node.name())
