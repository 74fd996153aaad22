"""The candidate-scoring network, and policies as files."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch

from haap_rl.problem.errors import InputError
from haap_rl.search import candidate_policy
from haap_rl.search.candidate_policy import CandidateNetwork, load_policy, policy_bytes, sample
from haap_rl.space.construction import FEATURES


def network(**settings):
    torch.manual_seed(0)
    return CandidateNetwork(len(FEATURES), 8, **settings).eval()


def observations(n=5, candidates=7):
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(n, candidates, len(FEATURES))).astype(np.float32)
    legal = rng.random((n, candidates)) < 0.6
    legal[:, 0] = True
    seen[~legal] = 0.0
    seen[:, :, 0] = legal
    return torch.from_numpy(seen), torch.from_numpy(legal)


@torch.no_grad()
def test_scores_follow_the_candidates_and_illegal_ones_get_none():
    seen, legal = observations()
    logits, values = network()(seen)
    assert (logits[~legal] == candidate_policy.IMPOSSIBLE).all()
    assert torch.softmax(logits, 1)[~legal].max() == 0
    order = torch.from_numpy(np.random.default_rng(1).permutation(seen.shape[1]))
    shuffled, same = network()(seen[:, order])
    torch.testing.assert_close(shuffled, logits[:, order])
    torch.testing.assert_close(same, values)
    padded = torch.cat([seen, torch.zeros(len(seen), 9, seen.shape[2])], 1)
    torch.testing.assert_close(network()(padded)[0][:, : seen.shape[1]], logits)


@torch.no_grad()
def test_a_blank_feature_is_not_looked_at():
    seen, _ = observations()
    column = FEATURES.index("stop_now")
    changed = seen.clone()
    changed[:, :, column] += 1.0
    assert not torch.equal(network()(seen)[0], network()(changed)[0])
    torch.testing.assert_close(network(blank=[column])(seen)[0], network(blank=[column])(changed)[0])


def test_samples_have_the_probabilities_of_the_softmax():
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, candidate_policy.IMPOSSIBLE, 2.0]])
    drawn = torch.bincount(sample(logits.repeat(40000, 1)), minlength=4) / 40000
    torch.testing.assert_close(drawn, torch.softmax(logits[0], 0), atol=0.01, rtol=0)


def test_a_policy_file_gives_the_same_network_back(tmp_path):
    path = tmp_path / "policy.npz"
    path.write_bytes(policy_bytes(network(blank=[3]), {"seed": 7}))
    loaded, facts = load_policy(str(path))
    seen, _ = observations()
    assert facts == {"seed": 7}
    torch.testing.assert_close(loaded(seen), network(blank=[3])(seen))


def changed_header(content, **changes):
    arrays = dict(np.load(io.BytesIO(content)))
    header = json.loads(str(arrays.pop("header")))
    file = io.BytesIO()
    np.savez(file, header=np.array(json.dumps({**header, **changes})), **arrays)
    return file.getvalue()


def pickled(content):
    file = io.BytesIO()
    np.savez(file, header=np.array([{"schema": "x"}], dtype=object))
    return file.getvalue()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[: len(content) // 2], "it is not a whole policy file"),
        (lambda content: b"", "it is not a whole policy file"),
        (lambda content: b"\x80\x04nonsense", "it is not a whole policy file"),
        (pickled, "it is not a whole policy file"),
        (lambda content: changed_header(content, schema="other/1"), "it is not a whole policy file"),
        (lambda content: changed_header(content, hidden=10**9), "it is not a whole policy file"),
        (lambda content: changed_header(content, hidden=9), "its weights are not those of 9 hidden units"),
        (lambda content: changed_header(content, features_version=0), "it was trained on version 0 of the features"),
        (lambda content: changed_header(content, estimator_fingerprint="0" * 12), "it was trained with estimator 0000"),
    ],
)
def test_files_that_will_not_do_are_refused_in_one_line(tmp_path, spoil, message):
    path = tmp_path / "policy.npz"
    path.write_bytes(spoil(policy_bytes(network(), {})))
    with pytest.raises(InputError, match=message) as error:
        load_policy(str(path))
    assert "\n" not in str(error.value)
    assert "policy" in str(error.value)


def test_no_such_file_is_said():
    with pytest.raises(InputError, match="there is no such file; give pretrained"):
        load_policy("nowhere.npz")


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    spoilt = network()
    with torch.no_grad():
        spoilt.score.weight[0, 0] = float("nan")
    path = tmp_path / "policy.npz"
    path.write_bytes(policy_bytes(spoilt, {}))
    with pytest.raises(InputError, match="its weights are not those"):
        load_policy(str(path))


def test_the_file_holds_arrays_only(tmp_path):
    with zipfile.ZipFile(io.BytesIO(policy_bytes(network(), {}))) as file:
        for name in file.namelist():
            assert name.endswith(".npy")
            np.lib.format.read_array(io.BytesIO(file.read(name)), allow_pickle=False)
