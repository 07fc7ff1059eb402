"""The choice of the platform for tests, with the name of a platform that is made up."""

import platforms
import pytest

FAKE = {"JAX_PLATFORMS": "fake,cpu"}


def test_tests_run_on_a_cpu_as_8_devices_unless_a_platform_is_given():
    chosen = platforms.settings({})
    assert chosen == platforms.settings({"JAX_PLATFORMS": "cpu"})
    assert chosen == platforms.settings({"JAX_PLATFORMS": ""})
    assert chosen["JAX_PLATFORMS"] == "cpu"
    assert "--xla_force_host_platform_device_count=8" in chosen["XLA_FLAGS"].split()
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "NPROC": "4"}
    chosen = platforms.settings(given)
    assert chosen["NPROC"] == "4" and "count=8" not in chosen["XLA_FLAGS"]


def test_workers_share_an_accelerator_which_rounds_no_factors():
    chosen = platforms.settings(FAKE | {"XLA_FLAGS": "--of_the_user"})
    assert chosen == FAKE | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    given = FAKE | {"JAX_DEFAULT_MATMUL_PRECISION": "tensorfloat32"}
    assert platforms.settings(given).items() >= given.items()


@pytest.mark.parametrize(
    ("platform", "count", "needs", "why"),
    [
        ("cpu", 8, {"cpu": "callbacks", "devices": 8}, None),
        ("fake", 8, {"devices": 8}, None),
        ("fake", 1, {}, None),
        ("fake", 1, {"devices": 8}, "needs 8 devices, not 1 of fake"),
        ("fake", 8, {"cpu": "callbacks"}, "needs a CPU: callbacks"),
    ],
)
def test_what_needs_a_cpu_or_more_devices_is_skipped_with_a_reason(
    platform: str, count: int, needs: dict, why: str | None
):
    assert platforms.reason_to_skip(platform, count, **needs) == why
