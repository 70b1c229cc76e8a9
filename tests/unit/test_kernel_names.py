"""Names that real tools give one kernel come to one form; names of different kernels stay apart."""

from __future__ import annotations

import pytest

from tb_chopper.backend import kernel_names
from tb_chopper.backend.kernel_names import family, normalize

FILL = ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
        "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)")
MANGLED = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"


@pytest.mark.parametrize("variant", [
    FILL, FILL + " [clone .kd]", FILL + " (.kd)", FILL.replace("> >", ">>"),
    FILL.replace("<4,", "<(int)4,").replace("1ul", "(unsigned long)1").replace("char*", "char *"),
])
def test_one_kernel_has_one_name(variant):
    assert normalize(variant) == normalize(FILL)


@pytest.mark.skipif(kernel_names._demangler() is None, reason="no C++ library here")
def test_a_mangled_name_is_the_demangled_one():
    assert normalize(MANGLED) == normalize(MANGLED + ".kd") == normalize(FILL)
    assert normalize("_Z_not_a_symbol") == "_Z_not_a_symbol"


def test_a_machine_without_a_cpp_library_keeps_the_name(monkeypatch):
    monkeypatch.setattr(kernel_names, "_demangler", lambda: None)
    assert kernel_names.demangle(MANGLED) == MANGLED


def test_nsights_lambdas_are_kinetos():
    assert normalize("f<[lambda(float) (instance 1)]>") == normalize("f<{lambda(float)#1}>")
    assert normalize("void <unnamed>::g<(bool)1>(int)") == normalize("void (anonymous namespace)::g<true>(int)")


def test_tensile_and_kd():
    name = "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN"
    assert normalize(name + ".kd") == name
    assert normalize(name) != normalize(name.replace("MT256x256x64", "MT128x256x64"))


@pytest.mark.parametrize(("a", "b", "same"), [
    (FILL, FILL.replace("<4,", "<8,"), True),
    ("Cijk_Ailk_Bljk_BBS_BH_Bias_MT256x256x64_MI16x16x1_SN_A", "Cijk_Ailk_Bljk_BBS_BH_Bias_MT256x256x64_MI32x32x1_B",
     True),
    ("Cijk_Ailk_Bljk_BBS_BH_Bias_MT256x256x64_X", "Cijk_Alik_Bljk_BBS_BH_Bias_MT256x256x64_X", False),
    ("triton_poi_fused_add_3", "triton_poi_fused_add_17", True),
    ("triton_poi_fused_add_3", "triton_red_fused_add_3", False),
    ("void ck::kernel_a<1>(int)", "void ck::kernel_b<1>(int)", False),
    ("void (anonymous namespace)::softmax<float>(int)", "void (anonymous namespace)::softmax<half>(int)", True),
])
def test_family_is_what_tuning_does_not_change(a, b, same):
    assert (family(a) == family(b)) is same


def test_long_names_take_no_time():
    name = "void f<" + "std::array<char*, 1ul>, " * 400 + "int>(" + "float, " * 500 + "int)"
    assert len(normalize(name)) < len(name) and family(name) == "f"
