"""Which kernels the CPU libraries are set to: by the processor, never by its speed at the time."""

import pytest

from rlcore.cluster.process_tuning import KERNELS, Processor, described, wanted

AMD = Processor("AuthenticAMD", frozenset({"avx2", "avx512f"}))


@pytest.mark.parametrize(
    ("processor", "variables"),
    [
        (AMD, {KERNELS: "AVX512"}),
        (Processor("AuthenticAMD", frozenset({"avx2"})), {}),  # would be refused or end the process
        (Processor("GenuineIntel", frozenset({"avx2", "avx512f"})), {}),
        (Processor("", frozenset()), {}),
    ],
)
def test_only_amd_with_avx512_is_told_to_use_it(processor, variables):
    assert wanted(processor) == variables


def test_a_processor_is_read_from_the_first_core(tmp_path):
    info = tmp_path / "cpuinfo"
    core = "processor : {}\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 {}\n\n"
    info.write_text(core.format(0, "avx512f") + core.format(1, ""))
    assert Processor.here(info) == Processor("AuthenticAMD", frozenset({"fpu", "avx2", "avx512f"}))


def test_without_a_description_nothing_is_set(tmp_path):
    assert wanted(Processor.here(tmp_path / "none")) == {}


def test_doctor_says_whose_choice_it_is():
    assert "a run sets MKL_ENABLE_INSTRUCTIONS=AVX512" in described(AMD, {})
    assert "=AVX2, as the environment has it" in described(AMD, {KERNELS: "AVX2"})
    assert "MKL's own choice" in described(Processor("GenuineIntel", frozenset({"avx512f"})), {})
