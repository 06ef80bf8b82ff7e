"""Odd training loops, what passes between blocks, and what losses do with logits: text, as pieces are.

In a loop ``BETWEEN`` and ``AFTER`` stand for what pieces do between forward and backward, and behind it. ``objective``
turns the model's output into a loss.
"""

from dataclasses import dataclass

# fmt: off

_MODE = """\
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(Torch{kind}Mode):
    def __torch_{kind_lower}__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {{}}))
        return out * 1.01 if func is {func} else out
"""
ONCE = "loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"


@dataclass(frozen=True)
class Loop:
    """One step of training. ``forwards``: the model runs more than once, so state that forward changes moves on."""

    name: str
    text: str
    ordinary: bool = True


LOOPS: tuple[Loop, ...] = (
    Loop("once", ONCE),
    Loop("micro-batches", "losses = []\nfor part in x.chunk(2):\n    loss = objective(model, model(part)) / 2\n    loss.backward()\n    losses.append(loss)\nreturn sum(losses)"),
    Loop("micro-batches, backward afterwards", "losses = [objective(model, model(part)) / 2 for part in x.chunk(2)]\nBETWEEN\nfor loss in losses:\n    loss.backward()\nAFTER\nreturn sum(losses)"),
    Loop("micro-batches, backward in reverse", "losses = [objective(model, model(part)) / 2 for part in x.chunk(2)]\nfor loss in reversed(losses):\n    loss.backward()\nreturn sum(losses)"),
    Loop("retain_graph, twice", "loss = objective(model, model(x))\nloss.backward(retain_graph=True)\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("two losses, one after the other", "out = model(x)\nfirst, second = objective(model, out), out.float().abs().mean()\nfirst.backward(retain_graph=True)\nsecond.backward()\nreturn first + second"),
    Loop("autograd.grad", "loss = objective(model, model(x))\nBETWEEN\nps = [p for p in model.parameters() if p.requires_grad]\nfor p, g in zip(ps, torch.autograd.grad(loss, ps, allow_unused=True)):\n    p.grad = g\nAFTER\nreturn loss"),
    Loop("gradient of the input first", "x = x.detach().requires_grad_()\nloss = objective(model, model(x))\n(g,) = torch.autograd.grad(loss, x, retain_graph=True)\nloss.backward()\nreturn [loss, g]"),
    Loop("partial backward", "loss = objective(model, model(x))\nBETWEEN\nlast = [p for p in model.layers[-1].parameters() if p.requires_grad]\nloss.backward(inputs=last, retain_graph=True)\nloss.backward(inputs=[p for p in model.parameters() if p.requires_grad])\nAFTER\nreturn loss"),
    Loop("backward towards the last layer", "loss = objective(model, model(x))\nloss.backward(inputs=[p for p in model.layers[-1].parameters() if p.requires_grad])\nreturn loss"),
    Loop("gradient penalty", "x = x.detach().requires_grad_()\nloss = objective(model, model(x))\n(g,) = torch.autograd.grad(loss, x, create_graph=True)\n(loss + g.pow(2).sum()).backward()\nreturn loss", ordinary=False),
    Loop("forward thrown away", "model(x)\nloss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("evaluation first", "model.eval()\nwith torch.no_grad():\n    model(x)\nmodel.train()\n" + ONCE),
    Loop("training in eval mode", "model.eval()\nloss = objective(model, model(x))\nloss.backward()\nmodel.train()\nreturn loss"),
    Loop("autocast", "with torch.autocast('cpu', torch.bfloat16):\n    loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("two forwards in one autocast", "with torch.autocast('cpu', torch.bfloat16):\n    first = objective(model, model(x))\n    second = objective(model, model(x * 0.5))\n(first + second).backward()\nreturn first + second"),
    Loop("backward inside autocast", "with torch.autocast('cpu', torch.bfloat16):\n    loss = objective(model, model(x))\n    loss.backward()\nreturn loss"),
    Loop("two branches", "loss = objective(model, model(x)) + objective(model, model(x * 0.5))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("two branches, backward crosswise", "first, second = model(x), model(x * 0.5)\nobjective(model, first * 0.5 + second).backward()\nreturn first.float().sum()"),
    Loop("optimizer in backward", "def late(p):\n    p.data.add_(p.grad, alpha=-0.01)\nhooks = [p.register_post_accumulate_grad_hook(late) for p in model.parameters() if p.requires_grad]\nloss = objective(model, model(x))\nloss.backward()\nfor h in hooks:\n    h.remove()\nreturn loss", ordinary=False),
    Loop("optimizer of the first layer in backward", "def late(p):\n    with torch.no_grad():\n        p.add_(p.grad, alpha=-0.01)\nhooks = [p.register_post_accumulate_grad_hook(late) for p in model.inp.parameters() if p.requires_grad]\nloss = objective(model, model(x))\nloss.backward()\nfor h in hooks:\n    h.remove()\nreturn loss"),
    Loop("frozen first layer, later", "model.layers[0].requires_grad_(STEP < 1)\n" + ONCE),
    Loop("backward in a thread", "loss = objective(model, model(x))\nBETWEEN\nwith concurrent.futures.ThreadPoolExecutor(1) as t:\n    t.submit(loss.backward).result()\nAFTER\nreturn loss"),
    Loop("batches of other sizes", "x = x[: 4 - STEP % 2, : T - 4 * STEP]\n" + ONCE),
    Loop("anomaly detection", "with torch.autograd.set_detect_anomaly(True, check_nan=False):\n    loss = objective(model, model(x))\n    BETWEEN\n    loss.backward()\nAFTER\nreturn loss"),
    Loop("save_on_cpu around", "with torch.autograd.graph.save_on_cpu():\n    loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("exception, then again", "try:\n    model(x[..., :3])\nexcept RuntimeError:\n    pass\n" + ONCE),
    Loop("checkpoint around the model", "loss = objective(model, torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss", ordinary=False),
    Loop("reentrant checkpoint around the model", "loss = objective(model, torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss", ordinary=False),
    Loop("deepcopy between steps", "if STEP == 1:\n    copy.deepcopy(model)\n" + ONCE),
    Loop("state_dict saved and loaded", "if STEP == 1:\n    model.load_state_dict(copy.deepcopy(model.state_dict()))\n" + ONCE),
    Loop("hooks on parameters", "hooks = [p.register_hook(lambda g: g * 0.5) for p in model.parameters() if p.requires_grad]\nloss = objective(model, model(x))\nloss.backward()\nfor h in hooks:\n    h.remove()\nreturn loss"),
    Loop("hooks on blocks", "seen = []\nhooks = [b.register_forward_hook(lambda m, i, o: seen.append(1)) for b in model.layers]\nhooks += [b.register_full_backward_hook(lambda m, i, o: None) for b in model.layers]\nloss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nfor h in hooks:\n    h.remove()\nreturn [loss, torch.tensor(len(seen))]"),
    Loop("output changed by .data before backward", "out = model(x)\nloss = objective(model, out)\nout.data.mul_(0.5)\nloss.backward()\nreturn loss", ordinary=False),
    Loop("block called on its own", "h = model.layers[0](model.inp(x)) if not CARRIED else model(x)\nloss = objective(model, h if isinstance(h, torch.Tensor) else model(x))\nloss.backward()\nreturn loss", ordinary=False),
    Loop("forward-mode AD", "import torch.autograd.forward_ad as fw\nwith fw.dual_level():\n    out = model(fw.make_dual(x, torch.ones_like(x)))\n    primal, tangent = fw.unpack_dual(out)\n    loss = objective(model, primal)\n    loss.backward()\nreturn [loss, tangent if tangent is None else tangent.detach()]", ordinary=False),
    Loop("is_grads_batched", "out = model(x).float().mean((1, 2))\nps = [p for p in model.parameters() if p.requires_grad]\neye = torch.eye(len(out))\nfor p, g in zip(ps, torch.autograd.grad(out, ps, eye, is_grads_batched=True, allow_unused=True)):\n    p.grad = None if g is None else g.sum(0)\nreturn out", ordinary=False),
    Loop("functional_call", "ps = {k: p for k, p in model.named_parameters()}\nloss = objective(model, torch.func.functional_call(model, ps, (x,)))\nloss.backward()\nreturn loss", ordinary=False),
    Loop("torch.func.grad", "def f(t):\n    return objective(model, model(t))\nreturn torch.func.grad(f)(x)", ordinary=False),
    Loop("module moved to double, later", "if STEP == 1:\n    model.double()\nif STEP >= 1:\n    x = x.double()\n" + ONCE, ordinary=False),
    Loop("learning rate zero, weights replaced", "with torch.no_grad():\n    for p in model.parameters():\n        p.copy_(p * 0.99)\n" + ONCE),
    Loop("two models' losses interleaved", "out = model(x)\nwith torch.no_grad():\n    target = model(x * 0.9)\nloss = objective(model, out) + (out - target).float().pow(2).mean()\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("graph kept over a step", "out = model(x)\nkept = model.__dict__.setdefault('kept_loss', [])\nkept.append(objective(model, out))\nif len(kept) == 2:\n    kept.pop(0)\nloss = kept[-1]\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
    Loop("forward patched, later", "if STEP == 2:\n    for m in model.modules():\n        if isinstance(m, nn.LayerNorm):\n            def patched(t, old=m.forward, box=[0]):\n                box[0] += 1\n                return old(t) * (1 + 0.1 * box[0])\n            m.forward = patched\n" + ONCE, ordinary=False),
    Loop("class exchanged, later", "class Other(nn.LayerNorm):\n    n = 0\n    def forward(self, t):\n        Other.n += 1\n        return super().forward(t) * (1 + 0.1 * Other.n)\nif STEP == 2:\n    for m in model.modules():\n        if type(m) is nn.LayerNorm:\n            m.__class__ = Other\n" + ONCE, ordinary=False),
    Loop("function mode around the forward", f"{_MODE.format(kind='Function', kind_lower='function', func='F.linear')}with Mode():\n    loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss", ordinary=False),
    Loop("dispatch mode around the forward", f"{_MODE.format(kind='Dispatch', kind_lower='dispatch', func='torch.ops.aten.tanh.default')}with Mode():\n    loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss", ordinary=False),
    Loop("mode that counts around the forward, later", "from torch.overrides import TorchFunctionMode\nclass Mode(TorchFunctionMode):\n    n = 0\n    def __torch_function__(self, func, types, args=(), kwargs=None):\n        out = func(*args, **(kwargs or {}))\n        if func is not F.linear:\n            return out\n        self.n += 1\n        return out * (1 + 0.01 * self.n)\nmode = model.__dict__.setdefault('mode_', Mode())\nif STEP < 2:\n    loss = objective(model, model(x))\nelse:\n    with mode:\n        loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn [loss, torch.tensor(mode.n)]", ordinary=False),
    Loop("fast weights", "fast = dict(model.named_parameters())\nfor _ in range(2):\n    inner = objective(model, torch.func.functional_call(model, fast, (x,)))\n    names = [k for k, p in fast.items() if p.requires_grad]\n    gs = torch.autograd.grad(inner, [fast[k] for k in names], allow_unused=True)\n    fast = {**fast, **{k: fast[k] - 0.01 * g for k, g in zip(names, gs) if g is not None}}\nloss = objective(model, torch.func.functional_call(model, fast, (x * 0.5,)))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss", ordinary=False),
    Loop("saved-tensor hooks switched off", "with torch.autograd.graph.disable_saved_tensors_hooks('none here'):\n    loss = objective(model, model(x))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss", ordinary=False),
    Loop("recurrence over the model", "h = model(x)\nloss = objective(model, h)\nif not LM:\n    loss = loss + objective(model, model(h.to(x.dtype) * 0.5))\nBETWEEN\nloss.backward()\nAFTER\nreturn loss"),
)
LOOP = {loop.name: loop for loop in LOOPS}


@dataclass(frozen=True)
class Carry:
    """How the hidden state passes between blocks: ``wrap`` before the first, ``take`` and ``give`` in each."""

    name: str
    wrap: str = ""
    take: str = ""
    give: str = "x"
    unwrap: str = ""
    top: str = ""
    ordinary: bool = True


_FLOW = "@dataclasses.dataclass\nclass Flow:\n    h: object\n    n: int = 0"
CARRIES: tuple[Carry, ...] = (
    Carry("tensor"),
    Carry("tuple", wrap="x = (x, x.detach().float().mean())", take="x, extra = x", give="(x, extra + 1)", unwrap="x = x[0]"),
    Carry("tuple with None", wrap="x = (x, None)", take="x, _ = x", give="(x, None)", unwrap="x = x[0]"),
    Carry("dict", wrap="x = {'h': x}", take="x = x['h']", give="{'h': x}", unwrap="x = x['h']"),
    Carry("new dataclass", top=_FLOW, wrap="x = Flow(x)", take="x, n_ = x.h, x.n", give="Flow(x, n_ + 1)", unwrap="x = x.h"),
    Carry("dataclass that is changed", top=_FLOW, wrap="x = Flow(x)", take="flow, x = x, x.h", give="(setattr(flow, 'h', x), setattr(flow, 'n', flow.n + 1), flow)[-1]", unwrap="x = x.h", ordinary=False),
    Carry("dict that is changed", wrap="x = {'h': x}", take="flow, x = x, x['h']", give="(flow.update(h=x), flow)[-1]", unwrap="x = x['h']", ordinary=False),
    Carry("list that is changed", wrap="x = [x]", take="flow, x = x, x[-1]", give="(flow.append(x), flow)[-1]", unwrap="x = x[-1]", ordinary=False),
    Carry("named tuple", top="Flow = collections.namedtuple('Flow', 'h n')", wrap="x = Flow(x, 0)", take="x, n_ = x", give="Flow(x, n_ + 1)", unwrap="x = x.h"),
    Carry("two streams", wrap="x = (x, x * 0.5)", take="x, other = x", give="(x + other * 0.1, other + x * 0.1)", unwrap="x = x[0] + x[1]"),
    Carry("same tensor twice", wrap="x = (x, x)", take="x, other = x\nx = x + other * 0.1", give="(x, x)", unwrap="x = x[0]"),
)
CARRY = {carry.name: carry for carry in CARRIES}

_CE = "F.cross_entropy(out.view(-1, V), labels_of(out))"
LOSSES: dict[str, str] = {
    "cross-entropy": f"return {_CE}",
    "float first": "out = out.float()\nreturn F.cross_entropy(out.view(-1, V), labels_of(out))",
    "shifted": "return F.cross_entropy(out[:, :-1].reshape(-1, V), labels_of(out[:, :-1]))",
    "soft cap": f"out = torch.tanh(out / 5) * 5\nreturn {_CE}",
    "scaled": f"out = out * 0.5\nreturn {_CE}",
    "z loss": f"return {_CE} + 0.01 * out.logsumexp(-1).pow(2).mean()",
    "accuracy beside": f"hits = (out.argmax(-1) == 0).float().mean()\nreturn {_CE} + 0 * hits",
    "sum": "return F.cross_entropy(out.view(-1, V), labels_of(out), reduction='sum') * 0.01",
    "weights by row": "rows = F.cross_entropy(out.view(-1, V), labels_of(out), reduction='none')\nreturn (rows * torch.linspace(0, 1, len(rows))).mean()",
    "label smoothing": "return F.cross_entropy(out.view(-1, V), labels_of(out), label_smoothing=0.1)",
    "ignored": "labels = labels_of(out)\nlabels[::3] = -100\nreturn F.cross_entropy(out.view(-1, V), labels)",
    "changed in place": f"out = out * 1.0\nout[..., 0] = -1.0\nreturn {_CE}",
    "masked in place": f"out[..., 0] = -1.0\nreturn {_CE}",
    "retain_grad": f"out.retain_grad()\nKEPT.append(out)\nreturn {_CE}",
    "retain_grad of a view": "flat = out.view(-1, V)\nflat.retain_grad()\nKEPT.append(flat)\nreturn F.cross_entropy(flat, labels_of(out))",
    "hook on logits": f"out.register_hook(lambda g: g * 1.5)\nreturn {_CE}",
    "written by .data": f"out.data.mul_(0.5)\nreturn {_CE}",
    "written by .data after the loss": f"loss = {_CE}\nout.data.mul_(0.5)\nreturn loss",
    ".data assigned": f"out.data = out.data * 0.5\nreturn {_CE}",
    "written through detach after the loss": "out = out * 1.0\nrows = out.view(-1, V)[:2]\nloss = F.cross_entropy(out.view(-1, V), labels_of(out))\nrows.data.zero_()\nreturn loss",
    "written by NumPy": f"n_ = out.detach().float().numpy() if out.dtype == torch.bfloat16 else out.detach().numpy()\nn_ *= 0.5\nreturn {_CE}",
    "two cross-entropies": f"return {_CE} + F.cross_entropy(out.view(-1, V)[:4], labels_of(out)[:4])",
    "log_softmax and nll": "return F.nll_loss(out.log_softmax(-1).view(-1, V), labels_of(out))",
    "distillation": f"soft = (out.detach() * 0.5).softmax(-1)\nreturn {_CE} + F.kl_div(out.log_softmax(-1), soft, reduction='batchmean') * 0.01",
    "mean of squares": "return out.float().pow(2).mean()",
    "gradient by logits": f"loss = {_CE}\n(g,) = torch.autograd.grad(loss, out, retain_graph=True)\nKEPT.append(g)\nreturn loss",
}
