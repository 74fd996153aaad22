#!/usr/bin/env bash
# Builds the wheel, installs it in an environment of its own and uses it from an empty folder whose own envs/ and conf/
# must not get in the way: a run of every searcher, a sweep, W&B offline, the environment by its id, every command.
#   tests/check_wheel.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$work/dist" .
"$work/venv/bin/pip" --disable-pip-version-check install --quiet -c constraints.txt "$work"/dist/*.whl

mkdir -p "$work/empty/envs" "$work/empty/conf"
echo 'raise SystemExit("the wrong envs was imported")' > "$work/empty/envs/__init__.py"
cp "$work/empty/envs/__init__.py" "$work/empty/envs/haap_envs.py"
echo 'not: ours' > "$work/empty/conf/train.yaml"
cd "$work/empty"
run="$work/venv/bin/python -m haap_rl.train"
small="model=gpt3_1_3b cluster=v100x4_t4x4 budget.evaluations=100"

for search in random autohaap ga annealing ppo exact megatron alpa aceso amp metis sailor; do
  $run "+search=$search" $small "out=runs/$search" > "$search.log"
  test -s "runs/$search/result.json" && test -s "runs/$search/plan.json" && test -s "runs/$search/trace.csv"
  test -s "runs/$search/report.html"
done
"$work/venv/bin/python" -m haap_rl.report runs/ga runs/random out=compared.html > report.log
test -s compared.html
test -s runs/ppo/policy.zip
$run +search=ppo search.policy=pretrained $small out=runs/pretrained > pretrained.log
$run -m search=ga,random seed=0,1 $small hydra.sweep.dir=runs/sweep > sweep.log
test "$(find runs/sweep -name result.json | wc -l)" = 4
$run -m +search=random seed=0,1 $small tracking=wandb tracking.mode=offline hydra.sweep.dir=runs/wandb > wandb.log
test "$(find runs/wandb -name '*.wandb' | wc -l)" = 2
$run +search=replay search.plan=runs/ga/plan.json $small out=runs/replay > replay.log
"$work/venv/bin/python" -m haap_rl.estimate plan=runs/ga/plan.json model=gpt3_1_3b cluster=v100x4_t4x4 > estimate.log
plan="plan=runs/ga/plan.json model=gpt3_1_3b cluster=v100x4_t4x4"
"$work/venv/bin/python" -m haap_rl.export $plan to=ranks out=ranks > export.log
test -s ranks/ranks.csv
"$work/venv/bin/python" -m haap_rl.runtime $plan steps=1 check=true out=runs/runtime > runtime.log
test -s runs/runtime/trace.json
"$work/venv/bin/python" -m haap_rl.faults.simulate $plan faults=mecefo_high faults.policy=mecefo > simulate.log
"$work/venv/bin/python" -c 'import gymnasium; gymnasium.make("haap_envs:haap_rl/Partition-v0").reset(seed=0)'
"$work/venv/bin/python" -m haap_rl.profile out=profile.json model=gpt3_350m model.hidden=64 model.heads=4 model.kv_heads=4 \
  model.head_dim=16 model.ffn=128 model.vocab=100 problem.precision=fp32 problem.seq_len=16 microbatch=1 > profile.log
test -s profile.json
if $run +search=random modle=x > /dev/null 2> bad.log; then echo "bad input passed"; exit 1; fi
test "$(wc -l < bad.log)" = 1
echo "the wheel works from any folder"
