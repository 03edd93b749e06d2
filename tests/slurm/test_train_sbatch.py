"""scripts/slurm/train.sbatch in a Slurm cluster of two nodes."""

import pytest

from tests.slurm.cluster import NODES, wait_until
from tests.training_runs import records
from trainer.base.system.run_files import step_of


class Job:
    """A job of train.sbatch, as shipped, on both nodes."""

    def __init__(self, cluster, clone, tiny, folder):
        self.cluster, self.clone, self.tiny, self.folder = cluster, clone, tiny, folder
        self.out = folder / "job.out"
        self.run = folder / "tiny"

    def submit(self, *options, settings=(), cwd=None, **variables):
        script = self.clone / "scripts" / "slurm" / "train.sbatch"
        command = ["sbatch", "--parsable", "--nodes", "2", "--output", self.out, *options, script, *self.tiny]
        command += ["--run.output_folder", self.folder, *settings]
        self.id = self.cluster.call(*command, cwd=cwd or self.clone, **variables)
        return self

    def submit_endless(self, *options, **variables):
        """Submit a run that ends only when it is stopped, and wait until it trains."""
        self.submit(*options, settings=["--training.steps", "1000000"], **variables)
        wait_until(lambda: self.steps() > 2, lambda: self.text() + self.cluster.logs())
        return self

    def steps(self):
        return len(records(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def saved(self):
        return [step_of(path) for path in (self.run / "checkpoints").iterdir()]

    def text(self):
        return self.out.read_text() if self.out.exists() else ""

    def await_state(self, *states):
        return self.cluster.await_state(self.id, *states)


@pytest.fixture
def job(cluster, clone, tiny, tmp_path):
    yield Job(cluster, clone, tiny, tmp_path)
    cluster.cancel_all()


@pytest.mark.parametrize(
    ("options", "folder"),
    [(["--export=NONE"], "scripts"), (["--chdir=CLONE"], "elsewhere"), ([], "elsewhere")],
    ids=["without the variables, from a subfolder", "with --chdir from elsewhere", "from elsewhere"],
)
def test_a_job_trains_on_both_nodes(job, tmp_path, options, folder):
    (tmp_path / "elsewhere").mkdir()
    cwd = job.clone / "scripts" if folder == "scripts" else tmp_path / folder
    job.submit(*(option.replace("CLONE", str(job.clone)) for option in options), cwd=cwd)
    state = job.await_state("COMPLETED", "FAILED")
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), job.text()
    assert [record["step"] for record in records(job.run)] == [1, 2, 3, 4]
    assert "ranks: 2 x CPU" in job.text()


def test_an_invalid_setting_ends_the_job_with_one_line_and_code_2(job):
    job.submit(settings=["--training.stepz", "5"])
    assert job.await_state("FAILED", "COMPLETED")["ExitCode"] == "2:0"
    assert job.text() == "--training.stepz: unknown setting; did you mean '--training.steps'?\n"


@pytest.mark.parametrize(
    ("options", "variables", "line"),
    [
        (
            ["--ntasks-per-node=2", "--cpus-per-task=1"], {},
            "4 tasks on 2 nodes: use --ntasks-per-node 1; the task of a node starts NGPU processes",
        ),
        ([], {"MAX_REQUEUES": "many"}, "MAX_REQUEUES=many: expected an integer of at least 0"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(job, options, variables, line):
    job.submit(*options, **variables)
    assert job.await_state("FAILED", "COMPLETED")["ExitCode"] == "2:0"
    assert job.text() == line + "\n"


def test_a_script_outside_a_clone_says_where_to_submit_it(job, tmp_path):
    copy = tmp_path / "my.sbatch"
    copy.write_text((job.clone / "scripts" / "slurm" / "train.sbatch").read_text())
    job.id = job.cluster.call("sbatch", "--parsable", "--output", job.out, copy, cwd=tmp_path)
    assert job.await_state("FAILED", "COMPLETED")["ExitCode"] == "2:0"
    assert job.text() == (
        f"no clone with run_llama_train.sh contains {tmp_path} or the submitted script: "
        "submit from the clone, or with --chdir CLONE\n"
    )


def test_a_failure_of_one_node_is_the_exit_code_of_the_job(job, clone, tmp_path):
    """The second node exits with code 2; the first one waits for it and is stopped."""
    variables = tmp_path / "variables"
    variables.write_text(f'[ "$SLURMD_NODENAME" != {NODES[1]} ] || [ -z "$NODE_RANK" ] || export NGPU=none\n')
    job.submit(BASH_ENV=str(variables))
    assert job.await_state("FAILED", "COMPLETED")["ExitCode"] == "2:0", job.text()


def test_sigusr1_to_the_script_saves_and_queues_the_job_again(job):
    job.submit_endless()
    job.cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    assert job.await_state("PENDING", "FAILED", "COMPLETED")["Restarts"] == "1"
    assert job.saved() == [job.steps()], job.text()


def test_sigusr1_to_the_steps_saves_and_ends_the_job(job):
    job.submit_endless()
    job.cluster.call("scancel", "--signal=USR1", job.id)
    assert job.await_state("COMPLETED", "FAILED", "PENDING")["ExitCode"] == "0:0"
    assert job.saved() == [job.steps()], job.text()


def test_a_cancelled_job_saves_and_is_not_queued_again(job):
    job.submit_endless()
    job.cluster.call("scancel", job.id)
    job.await_state("CANCELLED")
    wait_until(lambda: job.saved() == [job.steps()], job.text)


def test_a_preempted_job_saves_and_is_queued_again(job, tmp_path):
    job.submit_endless()
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    job.cluster.call("sbatch", *urgent, cwd=tmp_path)
    assert job.await_state("PENDING", "FAILED", "COMPLETED")["Restarts"] == "1"
    assert job.saved() == [job.steps()], job.text()


def test_a_job_saves_before_its_time_limit_and_continues_and_saves_at_a_limit_without_a_warning(
    cluster, clone, tiny, tmp_path
):
    """Slurm's shortest limit is a minute, so both jobs run at the same time, each on a node. Slurm sends the warning up to a
    minute early, and checks limits twice a minute."""
    limits = {"warned": ["--time=2", "--signal=B:USR1@30"], "unwarned": ["--time=1", "--signal=B:CONT@0"]}
    jobs = {}
    for name, options in limits.items():
        (tmp_path / name).mkdir()
        jobs[name] = Job(cluster, clone, tiny, tmp_path / name)
        jobs[name].submit("--nodes=1", *options, settings=["--training.steps", "1000000"])
    warned, unwarned = jobs.values()
    try:
        assert unwarned.await_state("TIMEOUT", "FAILED", "COMPLETED")["JobState"] == "TIMEOUT", unwarned.text()
        wait_until(lambda: unwarned.saved() == [unwarned.steps()], unwarned.text)
        assert warned.await_state("PENDING", "TIMEOUT", "FAILED", "COMPLETED")["Restarts"] == "1", warned.text()
        saved = warned.saved()
        assert saved == [warned.steps()], warned.text()
        cluster.start_again(warned.id)
        wait_until(lambda: warned.steps() > saved[0], warned.text)
    finally:
        cluster.cancel_all()


def test_a_job_is_queued_again_after_a_node_is_lost_and_at_most_max_requeues_times(job, cluster):
    job.submit_endless("--comment=my comment", MAX_REQUEUES="1")
    for failures in (1, 2):
        cluster.kill_node(NODES[1])
        expected = "PENDING" if failures == 1 else "FAILED"
        job.await_state(expected)
        cluster.start_node(NODES[1])
        if failures == 1:
            assert cluster.call("squeue", "--noheader", "--jobs", job.id, "--format", "%k") == "my comment failures: 1"
            lines = len(job.text().splitlines())
            cluster.start_again(job.id)
            wait_until(lambda first=lines: "step" in "".join(job.text().splitlines()[first:]), job.text)
    assert "is not queued again, because MAX_REQUEUES is 1" in job.text()
