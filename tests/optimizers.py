"""Every optimizer of optax, found by enumeration, and what some of them need."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib


def find_optimizers() -> dict[str, Callable[..., Any]]:
    """Factories by name, in the order of their names: a new one in optax is found.

    That is every public function with a learning rate, and of `optax.contrib` every
    one that makes a transformation. `scale_by_*` are the parts that these are made of.
    """
    found = {}
    for module, prefix in ((optax, ""), (contrib, "contrib.")):
        for name, factory in sorted(inspect.getmembers(module, inspect.isfunction)):
            signature = inspect.signature(factory)
            makes_one = any(p.endswith("learning_rate") for p in signature.parameters)
            if module is contrib:
                makes_one |= "GradientTransformation" in str(
                    signature.return_annotation
                )
            if makes_one and not name.startswith(("_", "scale_by_")):
                found[prefix + name] = factory
    return found


# Those that clip the gradient of every example by itself: their gradients have a
# leading axis, and none of the sums that accumulation keeps would do.
PER_EXAMPLE = ("contrib.differentially_private_aggregate", "contrib.dpsgd")
_PRIVACY = {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0}

# What has no default, or whose default would leave a part of the optimizer unused.
ARGUMENTS: dict[str, dict[str, Any]] = {
    # By default only matrices of 128 rows and columns are factored.
    "adafactor": {"learning_rate": 0.1, "min_dim_size_to_factor": 2},
    # Without a key it warns: one will be required.
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "contrib.differentially_private_aggregate": _PRIVACY,
    "contrib.dpsgd": {"learning_rate": 0.1, **_PRIVACY},
    # The default rank of 128 exceeds the matrix.
    "contrib.galore": {"learning_rate": 0.1, "rank": 2},
    # The default first step of a millionth is lost beside bfloat16 parameters.
    "contrib.mechanize": {"base_optimizer": optax.adamw(0.1), "s_init": 0.1},
    # By default a plateau takes 10 windows.
    "contrib.reduce_on_plateau": {"patience": 1},
    # Wrappers of another optimizer.
    "contrib.sam": {
        "optimizer": optax.sgd(0.1),
        "adv_optimizer": optax.chain(contrib.normalize(), optax.sgd(0.1)),
    },
    "contrib.schedule_free": {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1},
    "contrib.split_real_and_imaginary": {"inner": optax.adam(0.1)},
}

# What `update` needs besides `value`, which all are given. A train step hands over
# nothing else, so that these cannot run in one.
EXTRA_ARGS: dict[str, tuple[str, ...]] = {
    # Its line search starts from the window's value and gradient.
    "lbfgs": ("grad", "value_fn"),
    # The diagonal of the Hessian is estimated from the objective.
    "contrib.sophia": ("obj_fn",),
}

# Of the matrix and of the vector, where optax's own code fails on float32 beside
# bfloat16.
MIXED = ("float32", "bfloat16")
DTYPES: dict[str, list[tuple[str, str]]] = {
    # It clamps a value of one dtype between bounds of the other.
    "contrib.mechanize": [("float32", "float32"), ("bfloat16", "bfloat16")],
    # The tangents of its Hessian all have the lowest dtype.
    "contrib.sophia": [("float32", "float32")],
}

# Whose updates are a small difference of large numbers, or from an iteration that
# enlarges the rounding of its input a hundred times.
ENLARGE_ROUNDING = {
    "contrib.muon",
    "contrib.schedule_free",
    "contrib.schedule_free_adamw",
    "contrib.schedule_free_sgd",
}

# That enumeration has to find, by name; `optimistic_adam` is about to be removed.
KNOWN = {
    *"adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan".split(),
    *"amsgrad fromage lamb lars lbfgs lion noisy_sgd novograd".split(),
    *"optimistic_adam_v2 optimistic_gradient_descent polyak_sgd radam".split(),
    *"rmsprop rprop sgd sign_sgd signum sm3 yogi".split(),
} | {
    f"contrib.{name}"
    for name in "acprop ademamix adopt cocob dadapt_adamw dog dowg dpsgd galore "
    "madgrad mechanize momo momo_adam muon prodigy reduce_on_plateau sam schedule_free "
    "schedule_free_adamw schedule_free_sgd simplified_ademamix sophia "
    "split_real_and_imaginary".split()
}


def make_optimizer(
    name: str, factory: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with the arguments above, or with a learning rate of 0.1."""
    parameters = inspect.signature(factory).parameters
    required = {n for n, p in parameters.items() if p.default is p.empty}
    arguments = ARGUMENTS.get(name, {n: 0.1 for n in required & {"learning_rate"}})
    with warnings.catch_warnings():
        # Those that optax is about to remove count until it does.
        warnings.simplefilter("ignore", DeprecationWarning)
        optimizer = factory(**arguments)
    if name == "contrib.sam":
        # It says that it takes extra arguments and raises on `value`.
        optimizer = optax.GradientTransformation(*optimizer)
    return optax.with_extra_args_support(optimizer)
