"""``import autockpt.auto``, with ``AUTOCKPT_PLAN=plan.yaml`` or ``AUTOCKPT_BUDGET=24GB``: one line for any script.

With a plan, the first model that fits it and is called to be trained gets it, right before that call; the line may
stand anywhere before training. What was attached, or at exit that nothing was and why, is printed on stderr.

With a budget, every Trainer of transformers (TRL's too) that is made afterwards gets ``AutockptCallback(budget=…)``,
which searches as training starts. Other loops do not show their loss and optimizer before their first step: there
nothing happens, and a line at exit says what to do instead.

This is the one module with an effect on import. It exchanges ``torch.nn.Module.__call__`` until a model is found: hooks
come too late, for a call has looked up the model's forward before it runs them.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autockpt.errors import AutockptError, PlanError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from autockpt.schema.plan import Plan

VARIABLE = "AUTOCKPT_PLAN"
BUDGET = "AUTOCKPT_BUDGET"


def _ending(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but an error of autockpt ends the script: one screen instead of a traceback, wherever this is."""

    @functools.wraps(call)
    def ended(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except AutockptError as error:
            print(f"autockpt: error: {error.message}", error.remedy, sep="\n", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from None

    return ended


class ModelWatch:
    """Waits for a model that the plan fits. Once the plan is attached it is out of the way of every further call.

    When the model that has the plan is gone (a script that trains one model after another), it waits for the next.
    """

    def __init__(self, plan: Plan, path: str) -> None:
        self.plan, self.path = plan, path
        self.settled = self._said = False
        self.why = ""  # the first whole model did not get the plan
        self._rejected: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._depth = 0  # of calls of modules within one another
        self._installed: Any = None
        self._original: Any = None

    def install(self) -> None:
        """Begin to look at calls of modules."""
        import torch
        from torch import nn

        if self._installed is not None:
            return
        self._original = original = nn.Module.__call__

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # a compiler that traces this is to see nothing of it
            if torch.compiler.is_compiling() or self._installed is not call:
                return original(module, *args, **kwargs)
            why, whole = self.consider(module), not self._depth
            if why and whole:
                self.why = self.why or f"{type(module).__name__}: {why}"
            self._depth += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            if why and whole:
                self._say_unfit(module, why)
            return result

        self._installed = call
        nn.Module.__call__ = call  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Stop looking. If other code has replaced the call since, ours stays beneath it and does nothing."""
        from torch import nn

        if nn.Module.__call__ is self._installed:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
        self._installed = None

    def consider(self, module: nn.Module) -> str:
        """Attach the plan where this call is a training step of a model that it fits; else why it is not for it."""
        import torch

        from autockpt.runtime import choices_for

        if not module._modules or not torch.is_grad_enabled():
            return ""
        if module not in self._rejected:
            try:
                choices_for(module, self.plan)
            except PlanError as error:
                self._rejected[module] = error.message
            else:
                # a frozen teacher of the same build is none; it is asked again, for a model may be thawed
                if any(p.requires_grad for p in module.parameters()):
                    self._attach(module)
        return self._rejected.get(module, "")

    def _say_unfit(self, module: nn.Module, why: str) -> None:
        """Once, as soon as a whole model was called to be trained and neither it nor a part of it got the plan."""
        if not (self._said or self.settled) and any(p.requires_grad for p in module.parameters()):
            self._said = True
            _say(f"{type(module).__name__} goes without a plan: {self.path} is not for it: {why}")

    def _attach(self, module: nn.Module) -> None:
        from autockpt.runtime import apply, attached_path

        self.uninstall()
        self.settled = True
        name = type(module).__name__
        if attached_path(module) is None:
            _say(f"{self.path} is attached to {name}\n{_ending(apply)(module, self.plan)}")
        else:
            _say(f"{name} has a plan already, which is left as it is; {self.path} is not used")
        weakref.finalize(module, self.install).atexit = False

    def report(self) -> None:
        """At exit: say so where nothing was attached."""
        # a process that only loads data, started by one that trains, has nothing to report
        if not self.settled and (self.why or multiprocessing.parent_process() is None):
            why = self.why or "this process called no model with gradients enabled"
            _say(f"{self.path} was attached to nothing: {why}")


@_ending
def start() -> ModelWatch | None:
    """What the import does. Ends the process with exit code 2 where plan or budget cannot be read."""
    path, budget = (os.environ.get(name, "").strip() for name in (VARIABLE, BUDGET))
    if path and budget:
        raise UsageError(f"{VARIABLE} and {BUDGET} are both set", remedy="Set one: a plan, or a budget to find one.")
    if budget:
        _search_in_trainers(budget)
    elif path:
        from autockpt.schema.run_directory import plan_at

        watch = ModelWatch(plan_at(Path(path)), path)
        watch.install()
        atexit.register(watch.report)
        return watch
    else:
        _say(f"neither {VARIABLE} nor {BUDGET} is set, so `import autockpt.auto` does nothing.")
    return None


def _search_in_trainers(budget: str) -> None:
    """Every Trainer that is made from now on gets a callback which searches; at exit a line says so where none was
    made.

    It ends the process with one screen where no plan can be had, and takes itself off where the script has its own.
    """
    from autockpt.schema.sizes import parse_budget

    parse_budget(budget)  # a malformed one is an error now, not after seconds of imports
    from transformers import trainer

    from autockpt.integrations.transformers import AutockptCallback, calling_trainer

    made: list[AutockptCallback] = []

    class Searching(AutockptCallback):
        on_train_begin = _ending(AutockptCallback.on_train_begin)
        on_step_begin = _ending(AutockptCallback.on_step_begin)
        _find = _ending(AutockptCallback._find)

        def __init__(self) -> None:
            super().__init__(budget=budget)
            made.append(self)

        def on_init_end(self, *args: Any, **kwargs: Any) -> None:
            handler = calling_trainer().callback_handler
            if any(isinstance(c, AutockptCallback) and c is not self for c in handler.callbacks):
                handler.callbacks = [c for c in handler.callbacks if c is not self]  # the script has one of its own
            else:
                _ending(super().on_init_end)(*args, **kwargs)

    def report() -> None:
        if not made and multiprocessing.parent_process() is None:
            _say(
                f"{BUDGET} changed nothing, because no Trainer of transformers was made in this process. Lightning "
                "takes AutockptLightningCallback(budget=…); a loop of your own calls autockpt.search and "
                "autockpt.apply."
            )

    trainer.DEFAULT_CALLBACKS.append(Searching)  # type: ignore[arg-type]
    atexit.register(report)


def _say(text: str) -> None:
    """On stderr, once for all processes of a distributed run."""
    if os.environ.get("RANK", "0") == "0":
        print(f"autockpt: {text}", file=sys.stderr, flush=True)


watch = start()
