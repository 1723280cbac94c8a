"""Faults in the lean pass of the engine: what it leaves out, joins and looks up."""

from tests.mutants.fault import fault

LEAN, FILE = "model/test_lean.py", "bebop/model/lean.py"

FAULTS = (
    fault("lean/sign-of-sines", FILE, "torch.cat([-sin[:, :half]", "torch.cat([sin[:, :half]", LEAN),
    fault("lean/no-norm-of-queries", FILE, "if self.own_norms:", "if False:", LEAN),
    fault("lean/no-residual", FILE, "mul_(up)).add_(x)", "mul_(up))", LEAN),
    fault("lean/gate-and-up", FILE, "gate, up = self.gate_up", "up, gate = self.gate_up", LEAN),
    fault("lean/shape-of-hooks", FILE, "(x.view(shape),), out.view(shape))", "(x,), out)", LEAN),
    fault(
        "lean/library-of-one-row-more",
        "bebop/model/products.py",
        "x.shape[0] >= self.one",
        "x.shape[0] > self.one",
        LEAN,
    ),
    fault(
        "lean/library-for-every-type",
        "bebop/model/products.py",
        'weight.dtype != torch.float32 or weight.device.type != "cpu"',
        'weight.device.type != "cpu"',
        LEAN,
    ),
    fault(
        "lean/bias-left-out",
        "bebop/model/products.py",
        "torch.addmm(self.bias, x, self.turned)",
        "torch.mm(x, self.turned)",
        LEAN,
    ),
    fault("lean/weights-copied", FILE, "            part.data = own\n", "            own\n", LEAN),
    fault("lean/moved-unnoticed", FILE, "if self.layers[0].replaced():", "if False:", LEAN),
    fault("lean/hooks-ignored", FILE, "            if layer.hooked():", "            if False:", LEAN),
    fault("lean/outputs-unseen", FILE, "in self.module._forward_hooks.values()", "in ()", LEAN),
    fault(
        "lean/outputs-unchanged", FILE, "out = out if changed is None else changed.flatten(0, 1)", "del changed", LEAN
    ),
    fault(
        "lean/states-of-modules",
        FILE,
        "return bool(self.module._forward_pre_hooks or self.module._forward_hooks_with",
        "return bool(self.module._forward_hooks or self.module._forward_hooks_with",
        LEAN,
    ),
    fault("lean/inference-tensors", FILE, "torch.inference_mode(False), torch", "torch", LEAN),
    fault("lean/window", FILE, 'FAMILIES = ("Llama",', 'FAMILIES = ("Llama", "Mistral",', LEAN),
    fault("lean/adapters", FILE, "is nn.Linear for name", "is not None for name", LEAN),
    fault("lean/fp64-norm", FILE, "if x.dtype == torch.float32:", "if True:", LEAN),
    fault(
        "lean/bias-of-another-pass",
        "bebop/model/attention.py",
        "if self._rows[0] is not self.bias or",
        "if self._rows[0] is None or",
        "model/test_attention.py",
    ),
    fault(
        "lean/views-of-another-pass",
        "bebop/model/attention.py",
        "size = (self.first_slot, batch,",
        "size = (0, batch,",
        "model/test_attention.py",
    ),
)
