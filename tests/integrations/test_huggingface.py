"""A real `transformers.Trainer`, watched: numbers of the loop written by hand, and the training it would have been."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import keelscope as ks
from keelscope.integrations.huggingface import KeelscopeCallback

MISSING = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make test installs them)")


def gpt2(dropout: float = 0.0) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **rates))


def data(rows: int = 80) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 50, (rows, 12), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[:, 0] = -100  # no token predicts the first, and the Trainer divides by the number of labels
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


class Batches:
    """A collator that keeps what the Trainer trains on, in order."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.seen.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        return dict(self.seen[-1])


def trainer(model, folder: Path, *callbacks, collator=None, rows=80, **options):
    from transformers import Trainer, TrainingArguments

    settings = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "max_grad_norm": 0.25,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 5,
    } | options
    arguments = TrainingArguments(str(folder / "out"), **settings)
    return Trainer(
        model,
        arguments,
        data_collator=collator or Batches(),
        train_dataset=data(rows),
        eval_dataset=data(8),
        callbacks=list(callbacks),
    )


def scale(learner, scaler) -> None:
    """What Accelerate makes of fp16 on a GPU; on a CPU it computes in float32."""
    learner.accelerator.native_amp, learner.accelerator.scaler = True, scaler


@pytest.mark.parametrize("precision", ["", "bf16", "fp16"])
def test_numbers_are_those_of_the_loop_by_hand(tmp_path, loops, precision):
    """Accumulation, clipping and a schedule; each optimizer step is one row."""
    callback, batches = KeelscopeCallback(tmp_path / "bert.h5", config={"note": "mine"}), Batches()
    options = {precision: True} if precision else {}
    # as by hand: a fused one rounds otherwise, which bf16 shows, and is called for skipped steps too
    options |= {"optim": "adamw_torch"} if precision else {}
    learner = trainer(gpt2(), tmp_path, callback, collator=batches, adam_epsilon=1e-4, **options)
    if precision == "fp16":
        scale(learner, loops.scaler())
    learner.train()
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    hand = loops.by_hand(
        model,
        optimizer,
        batches.seen[:12],
        lambda net, batch: net(**batch).loss,
        accumulate=2,
        clip=0.25,
        precision=precision,
        scheduler=schedule,
    )
    with ks.open_run(tmp_path / "bert.h5") as run:
        hand.truth.check(run)
        loops.same_run(run, hand.run)
        assert run.info.config["gradient_accumulation_steps"] == 2
        assert run.info.config["note"] == "mine"
        assert not run.live
    logged = [entry["grad_norm"] for entry in learner.state.log_history if "grad_norm" in entry]
    totals = callback.watch.run["scalars/grad_norm_total"].values
    np.testing.assert_allclose(totals, logged[hand.truth.skipped :], rtol=1e-5)
    assert totals.min() > 0.25, "clipping must have something to clip"


def test_steps_that_a_fused_optimizer_skips_are_marked(tmp_path, loops):
    """The Trainer counts them, and so does the run."""
    callback, batches = KeelscopeCallback(), Batches()
    learner = trainer(gpt2(), tmp_path, callback, collator=batches, fp16=True)
    scale(learner, loops.scaler())
    learner.train()
    run = callback.watch.run
    totals = run["scalars/grad_norm_total"].values
    skipped = run["scalars/skipped"].values
    assert run.steps.tolist() == list(range(learner.state.global_step))
    assert 0 < skipped.sum() < 4
    assert (np.isfinite(totals) == (skipped == 0)).all()
    logged = [entry["grad_norm"] for entry in learner.state.log_history if "grad_norm" in entry]
    np.testing.assert_allclose(totals[skipped == 0], np.array(logged)[skipped == 0], rtol=1e-5)
    assert not [finding for finding in ks.diagnose(run).findings if finding.rule.startswith("nonfinite")]


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"fp16": True}, {"activation_checkpointing": True}])
def test_training_is_what_it_would_have_been(tmp_path, loops, options):
    def train(*callbacks):
        events = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
        learner = trainer(gpt2(dropout=0.2), tmp_path, *callbacks, **events, **options)
        if "fp16" in options:
            scale(learner, loops.scaler())
        learner.train()
        times = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime"}
        times |= {"eval_samples_per_second", "eval_steps_per_second"}
        history = [{k: v for k, v in entry.items() if k not in times} for entry in learner.state.log_history]
        history = [
            entry | {"grad_norm": str(entry["grad_norm"])} if "grad_norm" in entry else entry for entry in history
        ]
        return learner.model, history, torch.random.get_rng_state()

    plain = train()
    watched = train(KeelscopeCallback(tmp_path / "run.h5", every=2, probes=["default", "updates", "sublayers"]))
    loops.same_weights(watched[0], plain[0])
    assert watched[1] == plain[1]
    assert torch.equal(watched[2], plain[2])


def test_logged_means_and_evaluations_are_at_their_step(tmp_path):
    callback = KeelscopeCallback(every=4)
    learner = trainer(
        gpt2(),
        tmp_path,
        callback,
        max_steps=7,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    learner.train()
    run, history = callback.watch.run, learner.state.log_history
    for name, key in {"loss": "loss", "eval_loss": "eval_loss", "learning_rate": "lr"}.items():
        wanted = {max(entry["step"] - 1, 0): entry[name] for entry in history if name in entry}
        series = run[f"scalars/{key}"]
        got = {s: v for s, v in zip(series.steps.tolist(), series.values.tolist(), strict=True) if not math.isnan(v)}
        assert got == pytest.approx(wanted | {step: got[step] for step in (0, 4) if key == "lr"}), name
    assert run["gradients/norm"].steps.tolist() == [0, 4]


def test_resumed_training_goes_on_with_its_step(tmp_path, loops):
    trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=4).train()
    callback, whole = KeelscopeCallback(tmp_path / "run.h5"), KeelscopeCallback()
    learner = trainer(gpt2(), tmp_path, callback)
    learner.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    trainer(gpt2(), tmp_path, whole).train()
    for key in ("gradients/rms", "parameter_gradients/norm", "scalars/loss", "scalars/lr"):
        resumed, unbroken = callback.watch.run[key], whole.watch.run[key]
        assert resumed.steps.tolist() == [4, 5]
        np.testing.assert_allclose(resumed.values, unbroken.values[4:], rtol=1e-5, err_msg=key)


def test_an_exception_closes_the_file(tmp_path):
    from transformers import TrainerCallback

    class Fails(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 3:
                raise RuntimeError("in the middle of a step")

    model = gpt2()
    with pytest.raises(RuntimeError, match="middle of a step"), KeelscopeCallback(tmp_path / "run.h5") as callback:
        trainer(model, tmp_path, callback, Fails()).train()
    with ks.open_run(tmp_path / "run.h5") as run:
        assert not run.live
        assert run["gradients/norm"].steps.tolist() == [0, 1, 2]
    assert not any(module._forward_hooks for module in model.modules())


def test_one_callback_records_every_training(tmp_path):
    callback = KeelscopeCallback(tmp_path / "run.h5")
    learner = trainer(gpt2(), tmp_path, callback, max_steps=2)
    for name in ("run.h5", "run-2.h5"):
        learner.train()
        assert callback.watch.path == tmp_path / name
        with ks.open_run(tmp_path / name) as run:
            assert run["gradients/norm"].steps.tolist() == [0, 1]


def test_it_is_one_of_theirs(tmp_path):
    from transformers import TrainerCallback

    class Mine(KeelscopeCallback):
        pass

    assert isinstance(KeelscopeCallback(), TrainerCallback)
    assert isinstance(Mine(), (Mine, TrainerCallback))
    assert type(KeelscopeCallback()) is type(KeelscopeCallback())
    learner = trainer(gpt2(), tmp_path, KeelscopeCallback())
    learner.remove_callback(KeelscopeCallback)
    assert "KeelscopeCallback" not in learner.callback_handler.callback_list


def test_only_the_main_process_records(tmp_path):
    from transformers import TrainerControl, TrainerState, TrainingArguments

    callback = KeelscopeCallback(tmp_path / "run.h5")
    other = TrainerState(is_world_process_zero=False)
    callback.on_train_begin(TrainingArguments(str(tmp_path)), other, TrainerControl(), model=gpt2(), optimizer=None)
    callback.on_log(None, other, None, logs={"loss": 1.0})
    callback.on_train_end(None, other, None)
    assert callback.watch is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every tensor
def test_compiled_by_the_trainer(tmp_path):
    """The Trainer compiles a wrapper that callbacks do not see: recorded steps run eager all the same."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, callback = KeelscopeCallback(), KeelscopeCallback(every=3)
    trainer(gpt2(), tmp_path, plain).train()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer(gpt2(), tmp_path, callback, **options).train()
    for key in ("gradients/norm", "outputs/rms"):
        series = callback.watch.run[key]
        assert series.steps.tolist() == [0, 3]
        np.testing.assert_allclose(series.values, plain.watch.run[key].values[[0, 3]], rtol=1e-4, err_msg=key)
    breaks = " ".join(torch._dynamo.utils.counters["graph_break"])
    assert "_current_graph_task_id" not in breaks, "our hooks were traced"
