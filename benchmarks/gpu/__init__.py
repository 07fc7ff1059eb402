"""Runs the library on one CUDA GPU: is it exact, what does it hold, how fast is it?

    python -m benchmarks.gpu --out benchmarks/results/gpu-h200

It needs 80 GB of GPU memory, jax for CUDA, optax and flax, and takes about seven
minutes. `--small` runs tiny inputs on any machine, to check that everything works; a
CPU does not tell the memory of a run.

A machine without a network gets all that it needs in the folder `.gpu`, next to jax:

    bash benchmarks/gpu/prepare.sh        # where there is a network
    bash .gpu/run.sh --out results        # on the machine, in the repository's root
    bash .gpu/run.sh pytest tests/core    # the same for tests of one device

Every case runs in a process of its own, because a device never forgets its peak, and
appends a line to `results.jsonl` when it ends: a run that is cut off tells something.
`--tables results.jsonl` writes the tables next to it again.
"""
