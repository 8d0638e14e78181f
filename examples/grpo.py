"""GRPO with torchrl's own parts: a tiny model learns to sort letters, from random weights, in minutes on two cores.

In turn: the collector makes groups of answers, each to one prompt; ``MCAdvantage`` compares the answers of a group as
they enter the replay buffer; ``GRPOLoss`` trains a model on them; the collector's policy gets the new weights.

    python examples/grpo.py
    python examples/grpo.py --seed 0 1 2 --out /tmp/grpo

Writes ``metrics.csv`` (a row for each step) and ``reward.png`` (a curve for each seed) into the folder ``--out``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices as small as these are not worth a second thread

import argparse
import copy
import csv
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from sorting import ANSWER_TOKENS, BLIND_REWARD, make_env, make_model, make_tokenizer, problems
from tensordict import TensorDictBase, set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_llm import LLMCollector, PromptSource

GROUP_ID = ("collector", "group_id")
# What advantage and loss read. To copy the texts and conversations beside it would take longer than the training.
TRAINED_ON = ("tokens", "masks", "log_probs", "collector", ("next", "reward"), ("next", "done"))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="a run for each")
    parser.add_argument("--steps", type=int, default=150, help="batches to collect and learn from")
    parser.add_argument("--groups", type=int, default=8, help="prompts in a batch")
    parser.add_argument("--group-size", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--minibatch", type=int, default=64, help="answers in an optimisation step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate; falls to 0 in the second half")
    parser.add_argument("--entropy", type=float, default=0.03, help="weight of the entropy bonus")
    parser.add_argument("--out", type=Path, default=Path("grpo_run"), help="folder for metrics.csv and reward.png")
    return parser.parse_args(argv)


def make_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TransformersWrapper:
    """What the collector generates with: a copy of the model, which changes only when it is given new weights."""
    return TransformersWrapper(
        copy.deepcopy(model),
        tokenizer=tokenizer,
        input_mode="history",
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": ANSWER_TOKENS, "do_sample": True},
    )


class Learner:
    """A model with its loss and its optimizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lr: float, entropy: float) -> None:
        self.model = model
        # With input_mode="tokens" it reads the very ids that were sampled; text might be tokenised in another way.
        actor = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_model_input=True, return_log_probs=True
        )
        # "rlhf": the tokens that masks.all_assistant_mask marks, which are those that the policy sampled.
        self.loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_coeff=1.0)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self._lr, self._entropy = lr, entropy

    def step(self, minibatch: TensorDictBase, progress: float) -> dict[str, float]:
        """One optimisation step; `progress` is the part of the run that is over."""
        self.optimizer.param_groups[0]["lr"] = self._lr * min(1.0, 2 * (1 - progress))
        losses = self.loss(minibatch)
        entropy = -losses.loss_entropy  # in nats per sampled token
        (losses.loss_objective - self._entropy * entropy).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": losses.loss_objective.item(), "entropy": entropy.item()}


def score(answers: TensorDictBase) -> dict[str, float]:
    rewards = answers["next", "reward"].flatten()
    return {"reward": rewards.mean().item(), "all_right": (rewards == 1.0).float().mean().item()}


def train(args: argparse.Namespace, seed: int) -> list[dict[str, float]]:
    tokenizer = make_tokenizer()
    learner = Learner(make_model(seed, tokenizer), tokenizer, args.lr, args.entropy)
    source = PromptSource(problems(), repeats=args.group_size, shuffle=True, seed=seed)
    answers = args.groups * args.group_size
    buffer = ReplayBuffer(
        storage=LazyStackStorage(answers),
        sampler=SamplerWithoutReplacement(),
        batch_size=args.minibatch,
        transform=MCAdvantage(grpo_size=args.group_size, prompt_key=GROUP_ID),
    )
    collector = LLMCollector(
        source.env(make_env),
        make_policy(learner.model, tokenizer),
        num_envs=answers,
        groups_per_batch=args.groups,
        max_policy_lag=0,  # on policy: what a batch needs is launched after each update, and nothing before
    )
    rows: list[dict[str, float]] = []
    start = time.perf_counter()
    with collector, trange(args.steps, desc=f"seed {seed}", unit="step") as bar:
        for step in bar:
            batch = next(collector).select(*TRAINED_ON)
            buffer.extend(batch)
            for minibatch in buffer:
                losses = learner.step(minibatch, progress=step / args.steps)
            buffer.empty()
            collector.update_policy_weights_(learner.model)
            seconds = time.perf_counter() - start
            rows.append({"seed": seed, "step": step, **score(batch), **losses, "seconds": seconds})
            bar.set_postfix(reward=f"{rows[-1]['reward']:.3f}", entropy=f"{losses['entropy']:.2f}")
    return rows


def save(rows: list[dict[str, float]], out: Path, unit: str) -> None:
    """Writes ``metrics.csv`` and ``reward.png``, and prints where the reward began and ended."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for seed in sorted({row["seed"] for row in rows}):
        rewards = torch.tensor([row["reward"] for row in rows if row["seed"] == seed])
        window = max(1, len(rewards) // 15)
        smooth = rewards.unfold(0, window, 1).mean(1)
        (line,) = axes.plot(range(window - 1, len(rewards)), smooth, label=f"seed {seed}")
        axes.plot(rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
        seconds = max(row["seconds"] for row in rows if row["seed"] == seed)
        first, last = smooth[0], smooth[-1]
        print(
            f"seed {seed}: mean reward {first:.3f} in the first {window} steps, {last:.3f} in the last "
            f"({seconds:.0f} s)"
        )
    axes.axhline(BLIND_REWARD, color="grey", linestyle="--", linewidth=0.8, label="best without reading the prompt")
    axes.set(xlabel=unit, ylabel="mean reward", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(out / "reward.png", dpi=110)
    pyplot.close(figure)
    print(f"wrote {out / 'metrics.csv'} and {out / 'reward.png'}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    set_list_to_stack(True).set()  # torchrl's LLM environments need it
    torch.set_num_threads(1)
    save([row for seed in args.seed for row in train(args, seed)], args.out, "step")


if __name__ == "__main__":
    main()
