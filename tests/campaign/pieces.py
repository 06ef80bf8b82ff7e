"""What can be odd about a model: pieces of program text that are put together at random.

In a text ``_N`` stands for the piece's number in its program, ``self`` for the module that hosts it, ``x`` for the
hidden state (batch × length × width), which ``use`` may replace; ``top`` stands above all classes.
"""

from dataclasses import dataclass

# fmt: off


@dataclass(frozen=True)
class Piece:
    """One oddity. ``ordinary``: usual in real models, so a plan must be right and not refused.

    ``argument`` is made by ``model_before`` and handed to every block as ``a_N``. ``between`` runs between forward and
    backward, ``after`` behind backward; both see ``model`` and the input ``x``.
    """

    name: str
    group: str
    use: str = ""
    setup: str = ""
    top: str = ""
    model_setup: str = ""
    model_before: str = ""
    argument: str = ""
    between_layers: str = ""
    between: str = ""
    after: str = ""
    ordinary: bool = False
    block_only: bool = False


SCALE = "x = x * (1 + 0.1 * float({value}))"


# State that every forward advances and reads: name, top, setup, advance, value. The kinds of objects that may hold it are
# those of tests/checkpointing/odd_programs.py.
COUNTERS: tuple[tuple[str, str, str, str, str], ...] = (
    ("int", "", "self.s_N = 0", "self.s_N += 1", "self.s_N"),
    ("list", "", "self.s_N = []", "self.s_N.append(1)", "len(self.s_N)"),
    ("dict", "", "self.s_N = {'n': 0}", "self.s_N['n'] += 1", "self.s_N['n']"),
    ("object of an own class", "class Box_N:\n    n = 0", "self.s_N = Box_N()", "self.s_N.n += 1", "self.s_N.n"),
    ("dataclass replaced", "@dataclasses.dataclass(frozen=True)\nclass Cfg_N:\n    n: int = 0", "self.s_N = Cfg_N()", "self.s_N = dataclasses.replace(self.s_N, n=self.s_N.n + 1)", "self.s_N.n"),
    ("class of an object", "class Low_N:\n    n = 1\nclass High_N:\n    n = 2", "self.s_N = Low_N()", "self.s_N.__class__ = High_N if self.s_N.n == 1 else Low_N", "self.s_N.n"),
    ("NumPy array reassigned", "", "self.s_N = np.zeros(1)", "self.s_N = self.s_N + 1", "self.s_N[0]"),
    ("NumPy generator as attribute", "", "self.s_N = np.random.default_rng(1)", "v_N = self.s_N.random()", "v_N"),
    ("generator", "", "self.s_N = (i for i in range(99))", "v_N = next(self.s_N)", "v_N"),
    ("closure", "def counting_N():\n    n = 0\n    def tick():\n        nonlocal n\n        n += 1\n        return n\n    return tick", "self.s_N = counting_N()", "v_N = self.s_N()", "v_N"),
    ("enumeration's member", "class Kind_N(enum.Enum):\n    A = 1\nKind_N.A.n = 0", "", "Kind_N.A.n += 1", "Kind_N.A.n"),
    ("module imported in forward", "import sys\nsys.modules['settings_N'] = types.ModuleType('settings_N')", "import settings_N\nsettings_N.n = 0", "import settings_N\nsettings_N.n += 1", "settings_N.n"),
    ("class counter", "class Box_N:\n    n = 0", "", "Box_N.n += 1", "Box_N.n"),
    ("counter of the module's class", "", "type(self).s_N = 0", "type(self).s_N += 1", "self.s_N"),
    ("global list", "COUNT_N = [0]", "", "COUNT_N[0] += 1", "COUNT_N[0]"),
    ("global NumPy generator", "RNG_N = np.random.default_rng(1)", "", "v_N = RNG_N.random()", "v_N"),
    ("ContextVar that forward sets", "VAR_N = contextvars.ContextVar('v_N')", "VAR_N.set(0)", "VAR_N.set(VAR_N.get() + 1)", "VAR_N.get()"),
    ("threading.local", "LOCAL_N = threading.local()", "LOCAL_N.n = 0", "LOCAL_N.n += 1", "LOCAL_N.n"),
    ("cached function that draws", "@functools.cache\ndef f_N(n): return random.random()", "self.s_N = 0", "self.s_N += 1", "f_N(self.s_N // 2) + random.random()"),
    ("gradient of a frozen parameter", "", "self.s_N = nn.Parameter(torch.zeros(()), requires_grad=False)", "self.s_N.grad = torch.zeros(()) if self.s_N.grad is None else self.s_N.grad + 1", "self.s_N.grad"),
    ("attribute that a buffer gets", "", "self.register_buffer('s_N', torch.zeros(()))", "self.s_N.n = getattr(self.s_N, 'n', 0) + 1", "self.s_N.n"),
    ("tensor by .data", "", "self.s_N = torch.zeros(())", "self.s_N.data.add_(1)", "self.s_N"),
    ("tensor in place", "", "self.s_N = torch.zeros(())", "self.s_N.add_(1)", "self.s_N"),
    ("tensor reassigned", "", "self.s_N = torch.zeros(())", "self.s_N = self.s_N + 1", "self.s_N"),
    ("buffer in place", "", "self.register_buffer('s_N', torch.zeros(()))", "self.s_N.add_(1)", "self.s_N"),
    ("buffers by an op over lists", "", "self.register_buffer('s_N', torch.zeros(()))", "torch._foreach_add_([self.s_N], 1)", "self.s_N"),
    ("buffer by NumPy", "", "self.register_buffer('s_N', torch.zeros(1))", "self.s_N.numpy()[0] += 1", "self.s_N"),
    ("buffer reassigned", "", "self.register_buffer('s_N', torch.zeros(()))", "self.s_N = self.s_N + 1", "self.s_N"),
    ("buffer's .data assigned", "", "self.register_buffer('s_N', torch.zeros(()))", "self.s_N.data = self.s_N + 1", "self.s_N"),
    ("view of a buffer", "", "self.register_buffer('s_N', torch.zeros(3)); self.t_N = self.s_N[1:]", "self.t_N[0] += 1", "self.s_N[1]"),
    ("frozen parameter by .data", "", "self.s_N = nn.Parameter(torch.zeros(()), requires_grad=False)", "self.s_N.data.add_(1)", "self.s_N"),
    ("frozen parameter in place", "", "self.s_N = nn.Parameter(torch.zeros(()), requires_grad=False)", "self.s_N.add_(1)", "self.s_N"),
    ("attribute of a child module", "", "self.c_N = nn.Identity(); self.c_N.n = 0", "self.c_N.n += 1", "self.c_N.n"),
    ("module in a list, its buffer", "", "self.s_N = [nn.Module()]; self.s_N[0].register_buffer('n', torch.zeros(()))", "self.s_N[0].n += 1", "self.s_N[0].n"),
)


def _counters() -> list[Piece]:
    return [
        Piece(f"counter: {name}", "state", top=top, setup=setup, use=f"{advance}\n{SCALE.format(value=value)}")
        for name, top, setup, advance, value in COUNTERS
    ]


def _statistics() -> list[Piece]:
    """State that forward advances and does not read: usual, and the same afterwards."""
    moe = "p_N = torch.softmax(self.gate_N(x), -1)\nself.load_N += p_N.detach().mean((0, 1))\nx = x * (1 + p_N[..., :1])"
    return [
        Piece("average in a buffer", "ordinary", setup="self.register_buffer('mean_N', torch.ones(D))", use="with torch.no_grad():\n    self.mean_N.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)\nx = x * self.mean_N.clone().to(x.dtype)", ordinary=True),
        Piece("call counter", "ordinary", setup="self.calls_N = 0", use="self.calls_N += 1", ordinary=True),
        Piece("MoE load statistics", "ordinary", setup="self.gate_N = nn.Linear(D, 4)\nself.register_buffer('load_N', torch.zeros(4))", use=moe, ordinary=True),
        Piece("MoE load in an attribute", "ordinary", setup="self.gate_N = nn.Linear(D, 4)\nself.load_N = torch.zeros(4)", use=moe, ordinary=True),
        Piece("history of norms", "ordinary", setup="self.norms_N = []", use="self.norms_N.append(x.detach().norm().item())", ordinary=True),
        Piece("last activation kept", "ordinary", setup="self.last_N = None", use="self.last_N = x.detach()", ordinary=True),
        Piece("call counter in an object", "statistics", top="class Stat_N:\n    calls = 0", setup="self.stat_N = Stat_N()", use="self.stat_N.calls += 1"),
        Piece("call counter in a NumPy array", "statistics", setup="self.stat_N = np.zeros(1)", use="self.stat_N[0] += 1"),
        Piece("global call counter", "statistics", top="CALLS_N = [0]", use="CALLS_N[0] += 1"),
        Piece("running maximum by .data", "statistics", setup="self.register_buffer('top_N', torch.zeros(()))", use="self.top_N.data = torch.maximum(self.top_N, x.detach().abs().max())"),
        Piece("auxiliary loss", "ordinary", setup="self.aux = None", use="self.aux = x.pow(2).mean() * 0.1", model_setup="self.uses_aux = True", ordinary=True),
    ]


def _caches() -> list[Piece]:
    rotary = (
        "if self.cos_N is None or self.cos_N.shape[0] < x.shape[1]:\n"
        "    a_ = torch.arange(x.shape[1])[:, None] * torch.arange(D)[None] * 0.01\n"
        "    self.cos_N, self.sin_N = a_.cos(), a_.sin()\n"
        "x = x * self.cos_N[: x.shape[1]].to(x.dtype) + x.roll(1, -1) * self.sin_N[: x.shape[1]].to(x.dtype)"
    )
    mask = "if x.shape[1] not in self.masks_N:\n    self.masks_N[x.shape[1]] = torch.ones(x.shape[1], 1).cumsum(0).log()\nx = x + self.masks_N[x.shape[1]].to(x.dtype)"
    grown = "if self.tri_N.shape[0] < x.shape[1]:\n    self.tri_N = torch.ones(x.shape[1], 1)\nx = x * (1 + self.tri_N[: x.shape[1]].to(x.dtype))"
    return [
        Piece("rotary cache in attributes", "ordinary", setup="self.cos_N = self.sin_N = None", use=rotary, ordinary=True),
        Piece("mask cache in a dict", "ordinary", setup="self.masks_N = {}", use=mask, ordinary=True),
        Piece("global mask cache", "ordinary", top="MASKS_N = {}", use=mask.replace("self.masks_N", "MASKS_N"), ordinary=True),
        Piece("cache buffer that grows", "ordinary", setup="self.register_buffer('tri_N', torch.ones(1, 1), persistent=False)", use=grown, ordinary=True),
        Piece("lru_cache", "ordinary", top="@functools.lru_cache\ndef table_N(n): return torch.arange(n)[:, None] * 0.1", use="x = x + table_N(x.shape[1]).to(x.dtype)", ordinary=True),
        Piece("cached_property", "ordinary", top="class Lazy_N:\n    @functools.cached_property\n    def t(self): return torch.ones(D) * 1.5", setup="self.lazy_N = Lazy_N()", use="x = x * self.lazy_N.t.to(x.dtype)", ordinary=True),
        Piece("cast at the first call", "ordinary", setup="self.w_N = torch.ones(D, dtype=torch.float64)\nself.ready_N = False", use="if not self.ready_N:\n    self.w_N = self.w_N.float() * 1.5\n    self.ready_N = True\nx = x * self.w_N.to(x.dtype)", ordinary=True),
        Piece("parameter cast at the first call", "ordinary", setup="self.w_N = nn.Parameter(torch.full((D,), 1.5, dtype=torch.float64), requires_grad=False)", use="if self.w_N.dtype != torch.float32:\n    self.w_N.data = self.w_N.data.float()\nx = x * self.w_N.to(x.dtype)", ordinary=True),
        Piece("autotuning table", "ordinary", top="class Tuner_N:\n    def __init__(self): self.best = {}\n    def __call__(self, x):\n        key = tuple(x.shape)\n        if key not in self.best: self.best[key] = 2.0\n        return x * self.best[key]", setup="self.tune_N = Tuner_N()", use="x = self.tune_N(x)", ordinary=True),
        Piece("cache of own objects by shape", "ordinary", top="class Entry_N:\n    def __init__(self, n): self.t = torch.ones(n, 1) * 1.1", setup="self.e_N = {}", use="e_ = self.e_N.setdefault(x.shape[1], None) or Entry_N(x.shape[1])\nself.e_N[x.shape[1]] = e_\nx = x * e_.t.to(x.dtype)", ordinary=True),
        Piece("debug list that is cleared", "ordinary", setup="self.dbg_N = []", use="self.dbg_N.clear()\nself.dbg_N.append(tuple(x.shape))", ordinary=True),
    ]


def _transforms() -> list[Piece]:
    """Pure code on the hidden state."""
    custom = (
        "class Twice_N(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n"
        "        return x * x * 0.5\n    @staticmethod\n    def backward(ctx, g):\n        (x,) = ctx.saved_tensors\n        return g * x"
    )
    stash = (
        "class Stash_N(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.x = x.detach().clone()\n"
        "        return x * x * 0.5\n    @staticmethod\n    def backward(ctx, g):\n        return g * ctx.x"
    )
    plain: dict[str, str] = {
        "in-place product of a clone": "x = x.clone()\nx.mul_(1.5)",
        "in-place relu": "x = (x + 0.1).relu_()",
        "in-place ops over lists": "a_, b_ = x * 1.5, x * 0.5\ntorch._foreach_add_([a_, b_], 0.1)\nx = torch.tanh(a_) + b_",
        "index assignment": "x = x.clone()\nx[:, 0] = 0.5",
        "write through a view": "x = x * 1.0\nx.view(-1)[:3] = 0.25",
        "masked_fill_": "x = (x * 1.0).masked_fill_(x > 1, 0.5)",
        "out-of-place then in-place sum": "h_ = F.silu(x)\nh_ += x\nx = h_",
        "transposed view": "x = x.transpose(1, 2).contiguous().transpose(1, 2)",
        "expand and sum": "x = x + x[:, :1].expand_as(x) * 0.1",
        "as_strided": "x = x.contiguous()\nx = x.as_strided(x.size(), x.stride()) * 1.1",
        "chunk and cat": "a_, b_ = x.chunk(2, -1)\nx = torch.cat([b_ * 1.1, a_], -1)",
        "split views changed in place": "x = x * 1.0\nx[..., : D // 2].mul_(0.5)",
        "complex fft": "x = torch.fft.irfft(torch.fft.rfft(x.float(), dim=-1) * 1.1, n=D, dim=-1).to(x.dtype)",
        "view_as_complex": "c_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())\nx = torch.view_as_real(c_ * torch.polar(torch.ones(()), torch.full((), 0.3))).flatten(-2).to(x.dtype)",
        "double and back": "x = (x.double() * 1.1).to(x.dtype)",
        "bfloat16 and back": "x = torch.tanh(x.bfloat16()).to(x.dtype)",
        "autocast inside": "with torch.autocast('cpu', torch.bfloat16):\n    h_ = x.float() @ torch.eye(D)\nx = h_.to(x.dtype) + x",
        "autocast switched off inside": "with torch.autocast('cpu', enabled=False):\n    x = torch.tanh(x)",
        "no_grad part": "with torch.no_grad():\n    s_ = x.abs().mean()\nx = x / (1 + s_)",
        "detach": "x = x + torch.sigmoid(x).detach() * x",
        "gradient hook on a tensor": "if x.requires_grad:\n    x = x * 1.0\n    x.register_hook(lambda g: g * 1.5)",
        "random mask": "x = x * (torch.rand_like(x.float()) > 0.1).to(x.dtype)",
        "Python random": "x = x * (1 + random.random())",
        "NumPy random": "x = x * (1 + float(np.random.rand()))",
        "functional dropout": "x = F.dropout(x, 0.2, self.training)",
        "topk and gather": "v_, i_ = x.topk(4, -1)\nx = x + torch.zeros_like(x).scatter(-1, i_, v_)",
        "data-dependent branch": "x = x * 1.1 if float(x.detach().sum()) > 0 else x * 0.9",
        "einsum": "x = torch.einsum('btd,bsd->bts', x, x).softmax(-1) @ x",
        "sort": "x = x + x.sort(-1).values * 0.1",
        "where": "x = torch.where(x > 0, x, x * 0.1)",
        "cumsum": "x = x + x.cumsum(1) * 0.01",
        "squeeze of an in-place output": "h_ = torch.sin(x * 0.1)\nh_.unsqueeze_(0)\nx = h_.squeeze(0)",
    }
    pieces = [Piece(name, "ordinary", use=use, ordinary=True) for name, use in plain.items()]
    return [
        *pieces,
        Piece("weighted by a parameter", "ordinary", setup="self.g_N = nn.Parameter(torch.ones(D))", use="x = x * self.g_N.to(x.dtype)", ordinary=True),
        Piece("parameter in a ParameterList", "ordinary", setup="self.g_N = nn.ParameterList([nn.Parameter(torch.ones(D))])", use="x = x * self.g_N[0].to(x.dtype)", ordinary=True),
        Piece("low-rank adapter", "ordinary", setup="self.down_N = nn.Linear(D, 4, bias=False)\nself.up_N = nn.Linear(4, D, bias=False)\nself.scale_N = {'default': 0.5}", use="x = x + self.up_N(self.down_N(x.float())).to(x.dtype) * self.scale_N['default']", ordinary=True),
        Piece("experts by routing", "ordinary", setup="self.gate_N = nn.Linear(D, 2)\nself.experts_N = nn.ModuleList(nn.Linear(D, D) for _ in range(2))", use="w_, i_ = self.gate_N(x.float()).softmax(-1).max(-1)\nh_ = torch.zeros_like(x, dtype=torch.float32)\nfor k_, e_ in enumerate(self.experts_N):\n    m_ = i_ == k_\n    h_[m_] += e_(x[m_].float()) * w_[m_][:, None]\nx = x + h_.to(x.dtype)", ordinary=True),
        Piece("spectral norm", "ordinary", setup="self.sn_N = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))", use="x = self.sn_N(x.float()).to(x.dtype)", ordinary=True),
        Piece("old spectral norm", "ordinary", setup="self.sn_N = nn.utils.spectral_norm(nn.Linear(D, D))", use="x = self.sn_N(x.float()).to(x.dtype)", ordinary=True),
        Piece("weight norm", "ordinary", setup="self.wn_N = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", use="x = self.wn_N(x.float()).to(x.dtype)", ordinary=True),
        Piece("BatchNorm as a child", "ordinary", setup="self.bn_N = nn.BatchNorm1d(D)", use="x = self.bn_N(x.float().transpose(1, 2)).transpose(1, 2).to(x.dtype)", ordinary=True),
        Piece("cumulative BatchNorm", "ordinary", setup="self.bn_N = nn.BatchNorm1d(D, momentum=None)", use="x = self.bn_N(x.float().transpose(1, 2)).transpose(1, 2).to(x.dtype)", ordinary=True),
        Piece("GRU", "ordinary", setup="self.gru_N = nn.GRU(D, D, batch_first=True)", use="x = self.gru_N(x.float())[0].to(x.dtype)", ordinary=True),
        Piece("depthwise convolution", "ordinary", setup="self.conv_N = nn.Conv1d(D, D, 3, padding=1, groups=D)", use="x = x + self.conv_N(x.float().transpose(1, 2)).transpose(1, 2).to(x.dtype)", ordinary=True),
        Piece("torch checkpoint inside", "ordinary", setup="self.in_N = nn.Linear(D, D)", use="x = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.in_N(t.float())), x, use_reentrant=False).to(x.dtype)", ordinary=True),
        Piece("reentrant checkpoint inside", "nested", setup="self.in_N = nn.Linear(D, D)", use="x = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.in_N(t.float())), x, use_reentrant=True).to(x.dtype)"),
        Piece("saved-tensor hooks inside", "nested", use="with torch.autograd.graph.save_on_cpu():\n    x = torch.tanh(x)"),
        Piece("autograd.grad inside", "nested", use="if torch.is_grad_enabled() and x.requires_grad:\n    with torch.enable_grad():\n        y_ = x.detach().requires_grad_()\n        (g_,) = torch.autograd.grad(torch.tanh(y_).sum(), y_)\n    x = x * g_"),
        Piece("second-order gradient inside", "nested", setup="self.in_N = nn.Linear(D, D)", use="if torch.is_grad_enabled() and x.requires_grad:\n    (g_,) = torch.autograd.grad(torch.tanh(self.in_N(x.float())).sum(), x, create_graph=True)\n    x = x + g_ * 0.1"),
        Piece("forces from an energy", "nested", setup="self.e_N = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))", use="if torch.is_grad_enabled() and x.requires_grad:\n    (g_,) = torch.autograd.grad(self.e_N(x.float()).sum(), x, create_graph=True)\n    x = x + 0.1 * g_"),
        Piece("forward-mode product inside", "nested", setup="self.in_N = nn.Linear(D, D)", use="o_, t_ = torch.func.jvp(lambda t: torch.tanh(self.in_N(t.float())), (x,), (torch.ones_like(x),))\nx = (o_ + 0.1 * t_).to(x.dtype)"),
        Piece("backward inside of forward", "nested", setup="self.in_N = nn.Linear(D, D)", use="if torch.is_grad_enabled():\n    y_ = torch.tanh(self.in_N(x.detach().float()))\n    y_.pow(2).mean().backward()\n    x = x + y_.detach().to(x.dtype)"),
        Piece("optimizer's step inside of forward", "nested", setup="self.in_N = [nn.Linear(D, D)]\nself.opt_N = torch.optim.SGD(self.in_N[0].parameters(), lr=0.1)", use="if torch.is_grad_enabled():\n    self.in_N[0](x.detach().float()).pow(2).mean().backward()\n    self.opt_N.step()\n    self.opt_N.zero_grad()\nx = x + self.in_N[0](x.detach().float()).to(x.dtype)"),
        Piece("teacher handed to NumPy", "writes", setup="self.in_N = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))", use="with torch.no_grad():\n    t_ = self.in_N(x.float())\nx = x + F.silu(self.in_N(x.float())).to(x.dtype)\nx = x + torch.from_numpy(t_.numpy().copy()).to(x.dtype) * 0.1"),
        Piece("function mode inside", "nested", top="class Mode_N(torch.overrides.TorchFunctionMode):\n    def __torch_function__(self, func, types, args=(), kwargs=None):\n        out = func(*args, **(kwargs or {}))\n        return out * 1.1 if func is torch.tanh else out", setup="self.in_N = nn.Linear(D, D)", use="with Mode_N():\n    x = torch.tanh(self.in_N(x.float())).to(x.dtype)"),
        Piece("drawn from a Sobol sequence", "state", setup="self.sobol_N = torch.quasirandom.SobolEngine(D, scramble=True, seed=1)", use="x = x * self.sobol_N.draw(1).to(x.dtype)"),
        Piece("custom autograd function", "custom", top=custom, use="x = Twice_N.apply(x)"),
        Piece("custom function with its own stash", "custom", top=stash, use="x = Stash_N.apply(x)"),
        Piece("dropout with a scheduled rate", "state", setup="self.drop_N = nn.Dropout(0.05)", use="self.drop_N.p = min(0.5, self.drop_N.p + 0.1)\nx = self.drop_N(x)"),
        Piece("moving average that is read", "state", setup="self.register_buffer('ema_N', torch.ones(()))", use="self.ema_N.mul_(0.9).add_(x.detach().float().abs().mean(), alpha=0.1)\nx = x / (1 + self.ema_N).to(x.dtype)"),
        Piece("requires_grad switched in forward", "state", setup="self.g_N = nn.Parameter(torch.ones(D))\nself.n_N = 0", use="self.n_N += 1\nself.g_N.requires_grad_(self.n_N % 2 == 1)\nx = x * self.g_N.to(x.dtype)"),
        Piece("hook added in forward", "state", setup="self.h_N = nn.Identity()", use="self.h_N.register_forward_hook(lambda m, i, o: o * 1.1)\nx = self.h_N(x)"),
        Piece("child module made in forward", "state", setup="self.n_N = 0", use="self.n_N += 1\nself.made_N = nn.Module()\nself.made_N.scale = self.n_N * 0.1\nx = x * (1 + self.made_N.scale)"),
        Piece("training flag flipped in forward", "state", setup="self.d_N = nn.Dropout(0.3)", use="self.d_N.train(not self.d_N.training)\nx = self.d_N(x)"),
    ]


def _reached() -> list[Piece]:
    """Modules that a unit reaches without being their parent."""
    bn = "x = {bn}(x.float().transpose(1, 2)).transpose(1, 2).to(x.dtype)"
    pieces = [
        Piece(f"BatchNorm in a {name}", "reached", setup=setup, use=bn.format(bn=where))
        for name, setup, where in (
            ("list", "self.r_N = [nn.BatchNorm1d(D)]", "self.r_N[0]"),
            ("tuple", "self.r_N = (nn.BatchNorm1d(D),)", "self.r_N[0]"),
            ("dict", "self.r_N = {'bn': nn.BatchNorm1d(D)}", "self.r_N['bn']"),
            ("closure", "bn_ = nn.BatchNorm1d(D)\nself.r_N = lambda t: bn_(t)", "self.r_N"),
            ("partial", "self.r_N = functools.partial(nn.Module.__call__, nn.BatchNorm1d(D))", "self.r_N"),
            ("SimpleNamespace", "self.r_N = types.SimpleNamespace(bn=nn.BatchNorm1d(D))", "self.r_N.bn"),
        )
    ]
    parent = "for layer in self.layers:\n    layer.__dict__['up_N'] = self"
    return [
        *pieces,
        Piece("BatchNorm in a global", "reached", top="BN_N = nn.BatchNorm1d(D)", use=bn.format(bn="BN_N")),
        Piece("BatchNorm of the parent", "reached", model_setup=f"self.bn_N = nn.BatchNorm1d(D)\n{parent}", use=bn.format(bn="self.up_N.bn_N"), block_only=True),
        Piece("counter of the parent", "reached", model_setup=f"self.n_N = 0\n{parent}", use="self.up_N.n_N += 1\n" + SCALE.format(value="self.up_N.n_N"), block_only=True),
        Piece("call counter of the parent", "statistics", model_setup=f"self.n_N = 0\n{parent}", use="self.up_N.n_N += 1", block_only=True),
        Piece("buffer of the parent", "reached", model_setup=f"self.register_buffer('n_N', torch.zeros(()))\n{parent}", use="self.up_N.n_N += 1\n" + SCALE.format(value="self.up_N.n_N"), block_only=True),
        Piece("weight shared by all blocks", "ordinary", model_setup="s_ = nn.Linear(D, D)\nfor layer in self.layers:\n    layer.s_N = s_", use="x = torch.tanh(self.s_N(x.float())).to(x.dtype)", ordinary=True, block_only=True),
        Piece("sibling changed", "reached", model_setup="for layer in self.layers:\n    layer.seen_N = 0\n    layer.__dict__['first_N'] = self.layers[0]", use="self.first_N.seen_N += 1\n" + SCALE.format(value="self.first_N.seen_N"), block_only=True),
        Piece("weight of the parent, a list around it", "ordinary", model_setup="self.w_N = nn.Linear(D, D)\nfor layer in self.layers:\n    layer.ref_N = [self.w_N]", use="x = torch.tanh(self.ref_N[0](x.float())).to(x.dtype)", ordinary=True, block_only=True),
    ]


def _outside() -> list[Piece]:
    """What a forward does to what is no module's own: hooks, other units' insides, libraries' objects, an optimizer."""
    hooked = "self.w_N = nn.Linear(D, D)\nself.ready_N = False"
    once = "if not self.ready_N:\n    {hook}\n    self.ready_N = True\nx = x + torch.tanh(self.w_N(x.float())).to(x.dtype)"
    halved = "lambda p: (p.grad.mul_(0.5), None)[1]"
    before = "for one_, other_ in zip(self.layers, self.layers[1:]):\n    other_.{field} = [one_]"
    return [
        Piece("hook on a parameter, once", "hooks", setup=hooked, use=once.format(hook="self.w_N.weight.register_hook(lambda g: g * 0.5)")),
        Piece("hook on an accumulated gradient, once", "hooks", setup=hooked, use=once.format(hook=f"self.w_N.weight.register_post_accumulate_grad_hook({halved})")),
        Piece("hook on a module's backward, once", "hooks", setup=hooked, use=once.format(hook="self.w_N.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))")),
        Piece("hook on the hidden state", "hooks", use="x = x * 1.0\nif x.requires_grad:\n    x.register_hook(lambda g: g * 0.5)"),
        Piece("number in a part of the unit before", "reached", setup="self.part_N = nn.Linear(1, 1)\nself.part_N.n = 1.0\nself.before_N = []", model_setup=before.format(field="before_N"), use="for one_ in self.before_N:\n    one_.part_N.n *= 0.9\nx = x * self.part_N.n", block_only=True),
        Piece("norm of the unit before", "reached", setup="self.bn_N = nn.BatchNorm1d(D)\nself.norms_N = []", model_setup=before.format(field="norms_N"), use="bn_ = [*self.norms_N, self][0].bn_N\nx = bn_(x.float().transpose(1, 2)).transpose(1, 2).to(x.dtype)", block_only=True),
        Piece("count in an object derived from torch's", "state", top="class Law_N(torch.distributions.transforms.Transform):\n    n = 0", setup="self.law_N = Law_N()", use="self.law_N.n += 1\n" + SCALE.format(value="self.law_N.n")),
        Piece("Adam of its own", "state", setup="self.fast_N = [nn.Linear(D, D)]\nself.adam_N = torch.optim.Adam(self.fast_N[0].parameters(), lr=0.01)", use="with torch.enable_grad():\n    h_ = x.detach().float()\n    (self.fast_N[0](h_) - h_).pow(2).mean().backward()\nself.adam_N.step()\nself.adam_N.zero_grad()\nx = x + self.fast_N[0](x.detach().float()).detach().to(x.dtype)"),
    ]


def _weights() -> list[Piece]:
    """Parameters changed in forward."""
    linear = "self.w_N = nn.Linear(D, D)"
    apply = "\nx = torch.tanh(self.w_N(x.float())).to(x.dtype)"
    momentum = "self.k_N.weight.data = self.k_N.weight.data * 0.9 + self.w_N.weight.data * 0.1"
    key = f"{linear}\nself.k_N = nn.Linear(D, D).requires_grad_(False)"
    use_key = "\nx = torch.tanh(self.k_N(self.w_N(x.float()))).to(x.dtype)"
    quant = "q_ = self.w_N.weight.data.clone()\nself.w_N.weight.data = (q_ * 64).round() / 64"
    return [
        Piece("momentum encoder, .data assigned", "weights", setup=key, use=momentum + use_key),
        Piece("momentum encoder, .data in place", "weights", setup=key, use="self.k_N.weight.data.mul_(0.9).add_(self.w_N.weight.data, alpha=0.1)" + use_key),
        Piece("momentum encoder, no_grad", "weights", setup=key, use="with torch.no_grad():\n    self.k_N.weight.mul_(0.9).add_(self.w_N.weight, alpha=0.1)" + use_key),
        Piece("momentum encoder, copy_", "weights", setup=key, use="self.k_N.weight.data.copy_(self.k_N.weight.data * 0.9 + self.w_N.weight.data * 0.1)" + use_key),
        Piece("weight normalised by .data", "weights", setup=linear, use="self.w_N.weight.data = F.normalize(self.w_N.weight.data, dim=1)" + apply),
        Piece("weight normalised in place by .data", "weights", setup=linear, use="self.w_N.weight.data.div_(self.w_N.weight.data.norm(dim=1, keepdim=True))" + apply),
        Piece("weight clamped by .data", "weights", setup=linear, use="self.w_N.weight.data.clamp_(-0.05, 0.05)" + apply),
        Piece("weight decayed by .data", "weights", setup=linear, use="self.w_N.weight.data.mul_(0.95)" + apply),
        Piece("weight decayed by NumPy", "weights", setup=linear, use="w_ = self.w_N.weight.detach().numpy()\nw_ *= 0.95" + apply),
        Piece("weight rounded and put back", "weights", setup=linear, use=f"{quant}{apply}\nself.w_N.weight.data = q_"),
        Piece("weight swapped through an attribute", "weights", setup=f"{linear}\nself.v_N = nn.Linear(D, D)", use="self.w_N, self.v_N = self.v_N, self.w_N" + apply),
        Piece("perturbed weight put back in place", "weights", setup=linear, use=f"self.w_N.weight.data.add_(0.01){apply}\nself.w_N.weight.data.sub_(0.01)"),
    ]


def _writes() -> list[Piece]:
    """Writes that autograd's version counters do not see."""
    after = {
        ".data": "h_.data.mul_(0.5)",
        "NumPy": "n_ = h_.detach().numpy()\nn_ *= 0.5",
        ".data assigned": "h_.data = h_.data * 0.5",
        "the storage": "h_.untyped_storage().copy_((h_.detach() * 0.5).contiguous().untyped_storage())",
    }
    pieces = [
        Piece(f"saved tensor written by {name}", "writes", use=f"h_ = torch.tanh(x)\ny_ = torch.exp(h_ * 0.1) * h_\n{write}\nx = y_ * h_" if name != "NumPy" else f"h_ = torch.exp(x.float() * 0.1)\ny_ = h_ * h_\n{write}\nx = (y_ * h_).to(x.dtype)")
        for name, write in after.items()
    ]
    return [
        *pieces,
        Piece("input of the unit written by .data", "writes", use="h_ = torch.tanh(x)\nx.data.clamp_(-1, 1)\nx = x + h_"),
        Piece("clamp by .data between layers", "writes", between_layers="x.data.clamp_(-0.5, 0.5)"),
        Piece("clamp by NumPy between layers", "writes", between_layers="n_ = x.detach().float().numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()\nn_.clip(-0.5, 0.5, out=n_)"),
        Piece(".data assigned between layers", "writes", between_layers="x.data = x.data * 0.5"),
        Piece("in-place product between layers", "ordinary", between_layers="x = x * 1.0\nx.mul_(0.9)", ordinary=True),
        Piece("noise by .data between layers", "writes", between_layers="x.data.add_(0.1)"),
        Piece("detached branch between layers", "ordinary", between_layers="x = x + x.detach() * 0.1", ordinary=True),
        Piece("retain_grad between layers", "ordinary", between_layers="x.retain_grad() if x.requires_grad else None", ordinary=True),
        Piece("hook between layers", "ordinary", between_layers="x.register_hook(lambda g: g * 1.1) if x.requires_grad else None", ordinary=True),
    ]


def _arguments() -> list[Piece]:
    """Objects that every block is given, and changes."""
    box = "class Arg_N:\n    def __init__(self):\n        self.n = 0\n        self.seen = []"
    table: list[tuple[str, str, str, str, str]] = [
        ("object of an own class", box, "Arg_N()", "a_N.n += 1", "a_N.n"),
        ("dict", "", "{'n': 0}", "a_N['n'] += 1", "a_N['n']"),
        ("list that grows", "", "[]", "a_N.append(1)", "len(a_N)"),
        ("NumPy generator", "", "np.random.default_rng(2)", "v_N = a_N.random()", "v_N"),
        ("torch.Generator", "", "torch.Generator().manual_seed(2)", "v_N = torch.rand((), generator=a_N)", "v_N"),
        ("tensor by .data", "", "torch.zeros(())", "a_N.data.add_(1)", "a_N"),
        ("tensor in place", "", "torch.zeros(())", "a_N.add_(1)", "a_N"),
        ("parent module's counter", "", "self", "a_N.calls_N = getattr(a_N, 'calls_N', 0) + 1", "a_N.calls_N"),
        ("tensor of an object, reassigned", "class Arg_N:\n    def __init__(self):\n        self.t = torch.zeros(())", "Arg_N()", "a_N.t = a_N.t + 1", "a_N.t"),
        ("object that lives in the model", box, "self.__dict__.setdefault('kept_N', Arg_N())", "a_N.n += 1", "a_N.n"),
    ]
    pieces = [
        Piece(f"argument: {name}", "arguments", top=top, model_before=f"a_N = {make}", argument="a_N", use=f"{advance}\n{SCALE.format(value=value)}")
        for name, top, make, advance, value in table
    ]
    cache = "class Cache_N:\n    def __init__(self):\n        self.keys = []\n    def update(self, k):\n        self.keys.append(k)\n        return torch.cat(self.keys, 1)"
    flow = "class Flow_N:\n    def __init__(self, h):\n        self.h = h"
    return [
        *pieces,
        Piece("argument: BatchNorm", "arguments", model_setup="self.bn_N = nn.BatchNorm1d(D)", model_before="a_N = self.bn_N", argument="a_N", use="x = a_N(x.float().transpose(1, 2)).transpose(1, 2).to(x.dtype)"),
        Piece("argument: own KV cache", "arguments", top=cache, model_before="a_N = Cache_N()", argument="a_N", use="k_ = a_N.update(x)\nx = x + k_.mean(1, keepdim=True)"),
        Piece("argument: object with the hidden state", "arguments", top=flow, model_before="a_N = Flow_N(x)", argument="a_N", use="x = x + torch.tanh(a_N.h)\na_N.h = x"),
        Piece("argument: dict with the hidden state", "arguments", model_before="a_N = {'h': x}", argument="a_N", use="x = x + torch.tanh(a_N['h'])\na_N['h'] = x"),
        Piece("argument: list of hidden states", "arguments", model_before="a_N = []", argument="a_N", use="a_N.append(x)\nx = x + sum(torch.tanh(h_) for h_ in a_N)"),
        Piece("argument: auxiliary losses collected", "arguments", model_before="a_N = self.losses = []", argument="a_N", use="a_N.append(x.pow(2).mean())", model_setup="self.uses_losses = True"),
        Piece("argument: mask", "ordinary", model_before="a_N = torch.ones(x.shape[1], 1).cumsum(0).log()", argument="a_N", use="x = x + a_N.to(x.dtype)", ordinary=True),
        Piece("argument: pair of tensors", "ordinary", model_before="a_N = (torch.ones(D) * 1.1, torch.zeros(D))", argument="a_N", use="x = x * a_N[0].to(x.dtype) + a_N[1].to(x.dtype)", ordinary=True),
        Piece("argument: tensor that trains", "ordinary", model_setup="self.e_N = nn.Parameter(torch.ones(D))", model_before="a_N = self.e_N * 1.5", argument="a_N", use="x = x * a_N.to(x.dtype)", ordinary=True),
        Piece("argument: the first hidden state", "ordinary", model_before="a_N = x", argument="a_N", use="x = x + a_N * 0.1", ordinary=True),
        Piece("argument: settings object, only read", "ordinary", top="@dataclasses.dataclass\nclass Set_N:\n    scale: float = 1.1", model_before="a_N = Set_N()", argument="a_N", use="x = x * a_N.scale", ordinary=True),
        Piece("argument: torch.Generator for dropout", "ordinary", model_before="a_N = torch.Generator().manual_seed(3)", argument="a_N", use="x = x * (torch.rand(x.shape, generator=a_N) > 0.2).to(x.dtype)", ordinary=True),
        Piece("argument: None", "ordinary", model_before="a_N = None", argument="a_N", use="x = x if a_N is None else x * 2", ordinary=True),
        Piece("argument: callable", "ordinary", model_before="a_N = torch.tanh", argument="a_N", use="x = x + a_N(x)", ordinary=True),
    ]


def _between() -> list[Piece]:
    """What happens between forward and backward."""
    each = "for layer in model.layers:\n    "
    scale = "self.scale_N = 1.0"
    scaled = "x = x * (1 + self.scale_N)"
    inner = "for m_ in model.modules():\n    if hasattr(m_, '{name}'):\n        {do}"
    weight = "self.w_N = nn.Linear(D, D)"
    weighted = "x = torch.tanh(self.w_N(x.float())).to(x.dtype)"

    def changed(name: str, do: str) -> str:
        return inner.format(name=name, do=do)

    def both(first: str, then: str) -> dict[str, str]:
        return {"between": first, "after": then}

    return [
        Piece("eval() before backward", "between", use="x = x * (2.0 if self.training else 1.0)", **both("model.eval()", "model.train()")),
        Piece("eval() before backward, dropout", "between", setup="self.d_N = nn.Dropout(0.3)", use="x = self.d_N(x)", **both("model.eval()", "model.train()")),
        Piece("eval() before backward, nothing reads it", "ordinary", **both("model.eval()", "model.train()"), ordinary=True),
        Piece("attribute set before backward", "between", setup=scale, use=scaled, **both(changed("scale_N", "m_.scale_N = 0.5"), changed("scale_N", "m_.scale_N = 1.0"))),
        Piece("attribute of an object set before backward", "between", setup="self.cfg_N = types.SimpleNamespace(s=1.0)", use="x = x * (1 + self.cfg_N.s)", **both(changed("cfg_N", "m_.cfg_N.s = 0.5"), changed("cfg_N", "m_.cfg_N.s = 1.0"))),
        Piece("dict entry set before backward", "between", setup="self.cfg_N = {'s': 1.0}", use="x = x * (1 + self.cfg_N['s'])", **both(changed("cfg_N", "m_.cfg_N['s'] = 0.5"), changed("cfg_N", "m_.cfg_N['s'] = 1.0"))),
        Piece("NumPy array changed before backward", "between", setup="self.s_N = np.ones(1)", use="x = x * (1 + float(self.s_N[0]))", **both(changed("s_N", "m_.s_N[0] = 0.5"), changed("s_N", "m_.s_N[0] = 1"))),
        Piece("global changed before backward", "between", top="G_N = [1.0]", use="x = x * (1 + G_N[0])", **both("G_N[0] = 0.5", "G_N[0] = 1.0")),
        Piece("class attribute changed before backward", "between", top="class C_N:\n    s = 1.0", use="x = x * (1 + C_N.s)", **both("C_N.s = 0.5", "C_N.s = 1.0")),
        Piece("function patched before backward", "between", top="def f_N(x): return x * 1.5\ng_N = f_N", use="x = f_N(x)", **both("globals()['f_N'] = lambda x: x * 0.5", "globals()['f_N'] = g_N")),
        Piece("environment variable before backward", "between", top="os.environ['B_N'] = '1'", use="x = x * (1 + float(os.environ['B_N']))", **both("os.environ['B_N'] = '0.5'", "os.environ['B_N'] = '1'")),
        Piece("hook added before backward", "between", setup=weight, use=weighted, **both("hooks_N = [m_.w_N.register_forward_hook(lambda m, i, o: o * 2) for m_ in model.modules() if hasattr(m_, 'w_N')]", "[h_.remove() for h_ in hooks_N]")),
        Piece("hook removed before backward", "between", setup=f"{weight}\nself.hook_N = self.w_N.register_forward_hook(lambda m, i, o: o * 2)", use=weighted, **both(changed("hook_N", "m_.hook_N.remove()"), changed("hook_N", "m_.hook_N = m_.w_N.register_forward_hook(lambda m, i, o: o * 2)"))),
        Piece("ContextVar around forward", "between", top="CV_N = contextvars.ContextVar('cv_N', default=1.0)", use="x = x * (1 + CV_N.get())", model_before="t_N = CV_N.set(2.0)\nself.__dict__['token_N'] = t_N", between="CV_N.reset(model.token_N)"),
        Piece("parameter by .data before backward", "between", setup=weight, use=weighted, between=changed("w_N", "m_.w_N.bias.data.add_(1.0)")),
        Piece("weight by .data before backward", "between", setup=weight, use=weighted, between=changed("w_N", "m_.w_N.weight.data.mul_(0.5)")),
        Piece("parameter by NumPy before backward", "between", setup=weight, use=weighted, between=changed("w_N", "m_.w_N.bias.detach().numpy()[:] += 1")),
        Piece("parameter's .data assigned before backward", "between", setup=weight, use=weighted, between=changed("w_N", "m_.w_N.bias.data = m_.w_N.bias.data + 1")),
        Piece("buffer by .data before backward", "between", setup="self.register_buffer('b_N', torch.ones(()))", use="x = torch.tanh(x * self.b_N)", **both(changed("b_N", "m_.b_N.data.add_(1)"), changed("b_N", "m_.b_N.data.sub_(1)"))),
        Piece("buffer reassigned before backward", "between", setup="self.register_buffer('b_N', torch.ones(()))", use="x = torch.tanh(x * self.b_N)", **both(changed("b_N", "m_.b_N = m_.b_N + 1"), changed("b_N", "m_.b_N = m_.b_N - 1"))),
        Piece("buffer that is not saved, in place before backward", "between", setup="self.register_buffer('b_N', torch.ones(()))", use="x = torch.tanh(x + self.b_N)", **both(changed("b_N", "m_.b_N.add_(1)"), changed("b_N", "m_.b_N.sub_(1)"))),
        Piece("input by .data before backward", "between", between="x.data.mul_(0.5)"),
        Piece("input by NumPy before backward", "between", between="n_ = x.detach().numpy()\nn_ *= 0.5"),
        Piece("module exchanged before backward", "between", setup=weight, use=weighted, between=changed("w_N", "m_.w_N = copy.deepcopy(m_.w_N)")),
        Piece("dropout rate set before backward", "between", setup="self.d_N = nn.Dropout(0.2)", use="x = self.d_N(x)", **both(changed("d_N", "m_.d_N.p = 0.6"), changed("d_N", "m_.d_N.p = 0.2"))),
        Piece("requires_grad_ before backward", "between", setup=weight, use=weighted, **both(changed("w_N", "m_.w_N.requires_grad_(False)"), changed("w_N", "m_.w_N.requires_grad_(True)"))),
        Piece("random numbers drawn before backward", "ordinary", between="torch.rand(3); random.random(); np.random.rand()", ordinary=True),
        Piece("seeds set before backward", "ordinary", between="torch.manual_seed(7); random.seed(7); np.random.seed(7)", ordinary=True),
        Piece("evaluation before backward", "ordinary", between="with torch.no_grad():\n    model(x)", ordinary=True),
        Piece("statistics reset before backward", "ordinary", setup="self.count_N = 0", use="self.count_N += 1", between=changed("count_N", "m_.count_N = 0"), ordinary=True),
        Piece("instance method patched before backward", "between", setup="self.f_N = torch.tanh", use="x = self.f_N(x)", **both(changed("f_N", "m_.f_N = torch.sigmoid"), changed("f_N", "m_.f_N = torch.tanh"))),
        Piece("logging attribute set before backward", "ordinary", **both(f"{each}layer.step_ = 1", f"{each}layer.step_ = 2"), ordinary=True),
        Piece("default dtype before backward", "between", use="x = x + torch.ones(1)", **both("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)")),
        Piece("hidden state's attribute set before backward", "between", setup=scale, use="x = x * (1 + self.scale_N) if torch.is_grad_enabled() else x", **both(changed("scale_N", "m_.scale_N += 1"), "")),
    ]


ALL: tuple[Piece, ...] = (
    *_counters(),
    *_statistics(),
    *_caches(),
    *_transforms(),
    *_reached(),
    *_outside(),
    *_weights(),
    *_writes(),
    *_arguments(),
    *_between(),
)
BY_NAME = {piece.name: piece for piece in ALL}
assert len(BY_NAME) == len(ALL)
