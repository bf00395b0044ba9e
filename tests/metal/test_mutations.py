"""Every small fault that could stand in a kernel is known to be found; here those of barriers are, once more.

`mutate.py` plants them all, and `mutations.tsv` has what it found.
"""

import attention_cases as cases
import msl
import mutate
import pytest
import test_kernel_attention

from mlx_tformer import kernels

FAULTS = [fault for file in mutate.TESTS for fault in mutate.mutants(file)]
BARRIERS = [fault for fault in FAULTS if "threadgroup_barrier" in fault.key[1]]


def test_every_fault_has_a_test_that_finds_it_or_a_reason_to_change_nothing():
    verdicts = mutate.known()
    assert verdicts.keys() == {fault.key for fault in FAULTS}, "run tests/metal/mutate.py"
    assert mutate.NOT_FOUND not in verdicts.values()
    claims = {verdict for verdict in verdicts.values() if not verdict.startswith(mutate.NOTHING)}
    texts = "".join((mutate.HERE / name).read_text() for names in mutate.TESTS.values() for name in names)
    assert [name for name in claims if f"def {name}(" not in texts] == []


@pytest.mark.parametrize("fault", BARRIERS, ids=lambda fault: fault.new or "gone")
def test_a_barrier_that_is_missing_is_found(fault):
    source = fault.source()
    shape = (1, 4, 2, 3, 7)

    def make(**settings):
        return msl.metal_kernel(**(settings | {"source": source}))

    with kernels.made_by(make), pytest.raises(msl.KernelFault, match=r"race|before anything was written"):
        test_kernel_attention.check(shape, cases.asked("causal", [], shape))
