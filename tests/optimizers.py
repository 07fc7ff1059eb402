"""Every optimizer of optax, found by enumeration, and what some of them need."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib


def find_optimizers() -> dict[str, Callable[..., Any]]:
    """Return factories by name, sorted, so that a new one in optax is found.

    Factories are all public functions with a learning rate, and in `optax.contrib` all
    that make a transformation. `scale_by_*` are only the parts of these.
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


# These clip the gradient of each example: their gradients have a leading axis, so they
# cannot use accumulated sums.
PER_EXAMPLE = ("contrib.differentially_private_aggregate", "contrib.dpsgd")
_PRIVACY = {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0}

# Arguments without a default, or whose default leaves part of the optimizer unused.
ARGUMENTS: dict[str, dict[str, Any]] = {
    # By default only matrices of 128 rows and columns are factored.
    "adafactor": {"learning_rate": 0.1, "min_dim_size_to_factor": 2},
    # Without a key it warns that one will be required.
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "contrib.differentially_private_aggregate": _PRIVACY,
    "contrib.dpsgd": {"learning_rate": 0.1, **_PRIVACY},
    # The default rank of 128 exceeds the matrix.
    "contrib.galore": {"learning_rate": 0.1, "rank": 2},
    # The default first step of 1e-6 is lost next to bfloat16 parameters.
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

# Arguments of `update` in addition to `value`, which every optimizer receives. A train
# step passes only `value`, so these cannot run in one.
EXTRA_ARGS: dict[str, tuple[str, ...]] = {
    # Its line search starts from the window's value and gradient.
    "lbfgs": ("grad", "value_fn"),
    # The diagonal of the Hessian is estimated from the objective.
    "contrib.sophia": ("obj_fn",),
}

# Dtypes of the matrix and of the vector, where optax's own code fails on float32 next
# to bfloat16.
MIXED = ("float32", "bfloat16")
DTYPES: dict[str, list[tuple[str, str]]] = {
    # It clamps a value of one dtype between bounds of the other.
    "contrib.mechanize": [("float32", "float32"), ("bfloat16", "bfloat16")],
    # All tangents of its Hessian have the lowest dtype.
    "contrib.sophia": [("float32", "float32")],
}

# Their updates are small differences of large numbers, or come from an iteration that
# amplifies the rounding of its input 100 times.
ENLARGE_ROUNDING = {
    "contrib.muon",
    "contrib.schedule_free",
    "contrib.schedule_free_adamw",
    "contrib.schedule_free_sgd",
}

# Names that the enumeration must find; `optimistic_adam` is about to be removed.
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
    """Make the optimizer with `ARGUMENTS`, or with a learning rate of 0.1."""
    parameters = inspect.signature(factory).parameters
    required = {n for n, p in parameters.items() if p.default is p.empty}
    arguments = ARGUMENTS.get(name, {n: 0.1 for n in required & {"learning_rate"}})
    with warnings.catch_warnings():
        # Deprecated optimizers are tested until optax removes them.
        warnings.simplefilter("ignore", DeprecationWarning)
        optimizer = factory(**arguments)
    if name == "contrib.sam":
        # It claims to take extra arguments, but raises on `value`.
        optimizer = optax.GradientTransformation(*optimizer)
    return optax.with_extra_args_support(optimizer)
