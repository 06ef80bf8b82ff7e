import torch

from autockpt.tracing.kernels.signature import signature

aten = torch.ops.aten


def test_attention_is_the_same_on_every_device() -> None:
    q = torch.ones(2, 4, 8, 16)
    lse, empty, n = torch.ones(2, 4, 8), torch.ones(0), torch.zeros(1, dtype=torch.int64)
    forward = {
        signature(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0, True)),
        signature(aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.0, True), {"scale": 0.25}),
        signature(aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, True, 0.0, True)),
        signature(aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, True, 0.0, True)),
    }
    assert forward == {
        "attention(float32[2,4,8,16], float32[2,4,8,16], float32[2,4,8,16], mask=False, causal=True, dropout=0.0)"
    }
    cpu = signature(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (q, q, q, q, q, lse, 0.0, True))
    flash = (q, q, q, q, q, lse, None, None, 8, 8, 0.0, True, n, n)
    efficient = (q, q, q, q, empty, q, lse, n, n, 0.0, [True, True, True, False], True)
    assert cpu.startswith("attention_backward(")
    assert cpu == signature(aten._scaled_dot_product_flash_attention_backward.default, flash)
    assert cpu == signature(aten._scaled_dot_product_efficient_attention_backward.default, efficient)
