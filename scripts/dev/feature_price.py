"""Print what each capability costs in lines of code and of tests, as a table.

python scripts/dev/feature_price.py            # print the table
python scripts/dev/feature_price.py --write    # replace the table in CHANGELOG.md
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

PAGE = ROOT / "CHANGELOG.md"
BEGIN, END = "<!-- prices: begin -->\n", "<!-- prices: end -->\n"
FOLDERS = ("trainer", "models", "scripts", "tests")
WRITTEN = {".py", ".toml", ".jinja", ".js", ".css", ".sh", ".sbatch", ".yaml"}
"""Endings of the files that people write and read. Others are data, such as the default tokenizer."""

CAPABILITIES = {
    # Training
    "FSDP, and ranks without it": """
        trainer/parallel/{fsdp,unsharded}.py tests/parallel/test_{fsdp,unsharded}.py""",
    "Tensor and sequence parallelism": "trainer/parallel/tensor.py tests/parallel/test_tensor.py",
    "Context parallelism": "trainer/parallel/context_parallel.py tests/parallel/test_context_parallel.py",
    "Pipeline parallelism": "trainer/parallel/{pipeline,stages}.py tests/parallel/test_pipeline.py",
    "Mixtures of experts, expert parallelism": """
        models/{moe,mixture_sizes,row_groups}.py trainer/parallel/{experts,balance}.py scripts/dev/expert_layer.py
        tests/models/test_moe.py tests/parallel/test_{experts,correction}.py""",
    "Masks of documents and windows": "trainer/parallel/{attention,mixers,sample_layout}.py tests/parallel/test_documents.py",
    "Activation checkpointing and offloading": """
        trainer/parallel/activation_*.py trainer/tools/testing/techniques.py scripts/dev/memory_ablation.py
        tests/parallel/test_activation_*.py tests/scripts/test_memory_ablation.py""",
    "Speed-ups of layers that are not compiled": """
        trainer/parallel/{feed_forward,rotation,saved_tensors}.py tests/parallel/test_rotation.py""",
    "float8 products": "trainer/parallel/float8.py trainer/tools/testing/double.py tests/parallel/test_float8.py",
    "Chunked, vocabulary-parallel cross-entropy": """
        trainer/objective/cross_entropy.py tests/objective/test_cross_entropy.py""",
    "Learning-rate schedules": "trainer/optim/lr_schedule.py tests/optim/test_lr_schedule.py",
    "Cautious weight decay": "trainer/optim/decay.py",
    "Muon": "trainer/optim/{muon,exchange}.py tests/optim/test_muon.py",
    "Moments in 8 bits": "trainer/optim/quantized_moments.py tests/optim/test_quantized_moments.py",
    "Parameter groups": """
        trainer/optim/parameter_groups.py
        tests/optim/test_parameter_groups.py tests/end_to_end/test_optimizer_groups.py""",
    "Average of the weights": """
        trainer/optim/weight_average.py tests/optim/test_weight_average.py tests/end_to_end/test_average.py""",
    "Width transfer": """
        models/width.py trainer/tools/testing/coordinates.py scripts/coordinate_check.py
        tests/models/test_width.py tests/scripts/test_coordinate_check.py""",
    "Adapters (LoRA), peft's format": """
        trainer/adapters/{apply,select}.py trainer/checkpoint/formats/{adapter,peft*}.py
        tests/adapters/test_{apply,expert_adapters}.py tests/parallel/test_adapter_dropout.py tests/end_to_end/test_lora.py""",
    "Base models in 4 bits (QLoRA)": """
        trainer/adapters/nf4.py trainer/parallel/quantized.py
        tests/adapters/test_nf4.py tests/parallel/test_quantized.py tests/end_to_end/test_qlora.py""",
    "Preference losses (DPO, IPO, SimPO, ORPO)": """
        trainer/objective/{preference,reference}.py tests/end_to_end/test_preference.py""",
    "Skipped steps and rollbacks": "trainer/resilience/guard.py tests/resilience/test_guard.py",
    "Early stopping, best checkpoint": """
        trainer/resilience/early_stopping.py trainer/checkpoint/best.py
        tests/resilience/test_early_stopping.py tests/end_to_end/test_{early_stopping,best}.py""",
    "Evaluation": "trainer/evaluate.py trainer/data/store/held_out.py tests/test_evaluate.py tests/data/store/test_held_out.py",
    "Samples during training": "trainer/inference/{samples,in_training}.py tests/inference/test_samples.py",
    "Tasks during training": """
        trainer/tasks.py trainer/data/tasks/*.py trainer/objective/{document_scores,task_metrics}.py
        trainer/base/config/schema/tasks.py
        tests/data/tasks/*.py tests/objective/test_task_metrics.py tests/lm_eval_tasks.py
        tests/end_to_end/test_{tasks,lm_eval}.py""",
    "lm-evaluation-harness": """
        trainer/inference/{harness,scores}.py scripts/evaluate.py tests/inference/test_harness.py""",
    "Learning-rate range test": "scripts/find_lr.py tests/scripts/test_find_lr.py",
    # Models and formats
    "Recurrences: the delta rule, KDA, parts of sequences": """
        models/{affine_scan,delta_net,kda,hybrid}.py trainer/parallel/recurrence.py
        trainer/tools/testing/recurrence_bugs.py tests/models/test_delta_net.py tests/parallel/test_recurrence.py""",
    "Multi-token prediction": "trainer/objective/prediction.py tests/models/test_prediction.py",
    "Model families beside Llama": """
        models/{deepseek,gemma,gemma4,glm,gpt_oss,granite,kimi,mistral,mixtral,olmo,phi,qwen,qwen_next,smollm}.py
        scripts/dev/{family_matrix,check_configs}.py
        tests/models/{families,random_configs,random_recent,test_families,test_gpt_oss}.py""",
    "Hugging Face's format": """
        models/{huggingface*,config_json}.py trainer/checkpoint/formats/{huggingface*,export,tokenizer_files}.py
        scripts/convert_hf.py scripts/dev/{check_exports,export_cases}.py trainer/tools/testing/transformers_reader.py
        tests/checkpoint/formats/test_{huggingface,families,tokenizer_files}.py""",
    "Files for llama.cpp": """
        models/gguf.py trainer/checkpoint/formats/{gguf_writer,gguf_tokenizer}.py
        trainer/tools/testing/{gguf_files,llama_cpp_reader}.py
        tests/checkpoint/formats/{gguf_models,test_gguf,test_gguf_tokenizer}.py tests/end_to_end/test_gguf.py""",
    "Weights in FP8 and MXFP4": """
        trainer/checkpoint/formats/{fp8_blocks,mxfp4,quantization_config}.py
        tests/checkpoint/formats/test_{fp8_blocks,mxfp4}.py""",
    "--from: a folder gives several settings": """
        trainer/base/config/{pretrained,tokenizer_and_template}.py
        tests/base/config/test_pretrained.py tests/end_to_end/test_pretrained.py""",
    "Names on the Hugging Face Hub": "trainer/base/config/hub.py tests/base/config/test_hub.py tests/hub_server.py",
    "What a folder is": """
        trainer/base/config/recognition.py
        tests/base/config/test_recognition.py tests/checkpoint/formats/test_foreign_folders.py""",
    "Generation, models in Python": """
        trainer/inference/{engine,generate,kv_cache,load,next_logits,text}.py scripts/generate.py
        tests/inference/test_{batches,generate,load,text,without_bos}.py tests/test_python_page.py""",
    # Data
    "Texts and JSON lines, compressed or not": """
        trainer/data/sources/{text,text_field,json_records,streams}.py tests/data/sources/test_{text,streams}.py""",
    "JSON arrays": "trainer/data/sources/json_array.py tests/data/sources/test_json_array.py",
    "CSV": "trainer/data/sources/csv_records.py tests/data/sources/test_csv_records.py",
    "Parquet, Arrow, Hugging Face datasets": """
        trainer/data/sources/{tables,datasets_library}.py tests/data/sources/test_tables.py""",
    "Token files": "trainer/data/sources/tokens.py tests/data/sources/test_tokens.py",
    "Files of another format": "trainer/data/sources/contents.py tests/data/sources/test_contents.py",
    "Chats: templates and target tokens": """
        trainer/data/chat/{answers,format,sandbox,special_names,template*,tokens,traced_text,written_check}.py
        trainer/data/chat/templates/* tests/data/chat/{families,published}.py tests/end_to_end/test_chat.py
        tests/data/chat/test_{answers,corpus,format,published,special_names,template*,traced_text,written_check}.py""",
    "Chats and pairs: layouts": """
        trainer/data/chat/{chat_layouts,columns,conversations,fields,messages}.py
        tests/data/chat/{shapes,test_chat_layouts,test_fields}.py tests/data/prepare/test_layouts.py""",
    "Packing": "trainer/data/sampling/packing.py tests/data/sampling/test_packing.py",
    "Mixtures of datasets, phases": "trainer/data/sampling/{mixture,phases}.py tests/data/sampling/test_mixture.py",
    "Tokenizers of the package tokenizers": """
        trainer/data/tokenizer/{huggingface,hf_*,placeholders}.py
        tests/data/tokenizer/{folders,test_huggingface,test_placeholders}.py""",
    "Tokenizers of sentencepiece": """
        trainer/data/tokenizer/sentencepiece_json.py tests/data/tokenizer/test_sentencepiece_json.py""",
    "Tokenizers of tekken.json": "trainer/data/tokenizer/tekken.py tests/data/tokenizer/test_tekken.py",
    "Training of a tokenizer": "scripts/train_tokenizer.py",
    "Samples that a step has consumed": "scripts/inspect_samples.py tests/scripts/test_inspect_samples.py",
    "Samples as the model sees them": "trainer/tools/report/view/* tests/tools/report/view/*",
    # Checkpoints and runs
    "Object stores: URLs, mirror": """
        trainer/base/system/{etags,object_store,remote_files,remote_objects,remote_run,store_errors,urls}.py
        trainer/base/config/remote_paths.py
        trainer/checkpoint/{lease,mirror,uploads}.py scripts/dev/mirror_cost.py tests/{mirrored_runs,object_stores,s3_proxy}.py
        tests/base/system/test_{object_store,remote_files}.py tests/checkpoint/test_mirror*.py""",
    "Checkpoints, exact resume": """
        trainer/checkpoint/{commit,manager,manifest,resume,tensor_files}.py scripts/checkpoint.py
        tests/checkpoint/test_{commit,crash_points,failed_saves,manifest,resume}.py tests/scripts/test_checkpoint.py""",
    "Saves in the background": "trainer/checkpoint/async_save.py tests/checkpoint/test_async_save.py",
    "Hangs and the time limit of collectives": """
        trainer/resilience/watchdog.py trainer/runtime/collectives.py
        tests/resilience/test_watchdog.py tests/runtime/test_collectives.py""",
    "Stragglers": "trainer/resilience/straggler.py tests/resilience/test_straggler.py",
    "Stop signals": """
        trainer/base/system/signals.py tests/base/system/test_signals.py tests/end_to_end/test_signals.py""",
    "Several nodes: waiting, elastic runs, Slurm, Kubernetes": """
        trainer/runtime/{rendezvous,elastic}.py scripts/slurm/* scripts/kubernetes/*
        tests/runtime/test_rendezvous.py tests/end_to_end/test_nodes.py tests/slurm/* tests/scripts/test_train_sbatch.py""",
    "Console and metrics.jsonl": "trainer/run/metrics.py trainer/run/sinks/local.py tests/run/test_metrics.py",
    "TensorBoard": "trainer/run/sinks/tensorboard.py tests/run/sinks/test_tensorboard.py",
    "Weights & Biases, MLflow, Trackio": "trainer/run/sinks/{delivery,services}.py tests/run/sinks/test_{delivery,services}.py",
    "Traces and phases of steps": """
        trainer/run/profiler.py trainer/runtime/step_timer.py tests/run/test_profiler.py tests/runtime/test_step_timer.py""",
    "Dry run": "trainer/tools/{dry_run,trial}.py tests/tools/test_dry_run.py",
    "Memory and disk before the first step": "trainer/run/resources.py tests/run/test_resources.py",
    "Settings that exclude each other": """
        trainer/base/config/compatibility.py trainer/base/config/schema/{condition,facts}.py trainer/run/facts.py
        tests/base/config/test_compatibility.py""",
    "Names of other trainers": "trainer/base/config/foreign.* tests/base/config/test_foreign.py",
    # Proof and planning
    "Parity of layouts, injected bugs": """
        trainer/tools/testing/{bugs,layouts,parity,random_parameters,routing,transformers_model}.py scripts/parity.py
        tests/scripts/test_parity.py""",
    "Positions that a token influences": "scripts/leak_probe.py tests/scripts/test_leak_probe.py",
    "Fault matrix": "tests/faults/*",
    "Random input": "tests/fuzz/*",
    "Planner: memory and time of a run": """
        trainer/tools/planner/{estimate,limits,patches,peak,recorded,recorder,report,roofline,simulate}.py
        trainer/tools/testing/allocations.py scripts/plan.py scripts/dev/{check_plan,plan_recipes}.py
        tests/tools/planner/test_{estimate,report,roofline,simulate}.py tests/scripts/test_{plan,plan_recipes}.py""",
    "Planner: search for a layout": "trainer/tools/planner/search.py tests/tools/planner/test_search.py",
    "Accelerators": "trainer/runtime/accelerators.* tests/runtime/test_accelerators.py",
    "Page about runs": """
        trainer/tools/report/* scripts/report.py tests/tools/report/* tests/scripts/test_report.py""",
    "Comparison of two runs": "scripts/compare_runs.py tests/scripts/test_compare_runs.py",
    "Measurements on a CPU and a GPU": """
        scripts/dev/{benchmark,contenders,count_operators,kernels,peers,plain_loop,plot_losses,sweep}.py
        scripts/dev/gpu_acceptance.* tests/fake_gpu.py tests/end_to_end/test_fake_gpu.py
        tests/scripts/test_{benchmark,count_operators,gpu_acceptance,plot_losses,sweep}.py""",
}
"""Capability -> patterns of its files, separated by blanks; {a,b} stands for a or b. A file that several capabilities use counts
at the one that owns it, or, like every file that no pattern names, at the core."""


def patterns(text: str) -> Iterator[str]:
    """Yield the patterns of a capability, without braces."""
    for pattern in text.split():
        before, names, after = re.fullmatch(r"([^{]*)(?:\{(.+)\})?(.*)", pattern).groups()
        yield from (before + name + after for name in (names or "").split(","))


def written_files(pattern: str) -> set[Path]:
    """Return the files that match a pattern, except for data and generated files."""
    return {path for path in ROOT.glob(pattern) if path.suffix in WRITTEN and path.is_file()}


def lines(files: set[Path]) -> dict[str, int]:
    """Return the number of lines of files in each of FOLDERS."""
    counts = dict.fromkeys(FOLDERS, 0)
    for path in files:
        counts[path.relative_to(ROOT).parts[0]] += len(path.read_text().splitlines())
    return counts


def prices() -> dict[str, dict[str, int]]:
    """Return the lines of each capability in each of FOLDERS, then those of the core and of all files."""
    owned = {name: set().union(*map(written_files, patterns(text))) for name, text in CAPABILITIES.items()}
    everything = set().union(*(written_files(f"{folder}/**/*") for folder in FOLDERS))
    core = everything.difference(*owned.values())
    return {name: lines(files) for name, files in {**owned, "core": core, "total": everything}.items()}


def table() -> str:
    header = "".join(f" {folder}/ |" for folder in FOLDERS)
    rows = [f"| capability |{header}\n|---|{'--:|' * len(FOLDERS)}\n"]
    for name, counts in prices().items():
        rows.append(f"| {name} |" + "".join(f" {count:,} |" if count else " |" for count in counts.values()) + "\n")
    return "".join(rows)


def origin() -> str:
    """Return the line above the table: command, date and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return f"`python scripts/dev/feature_price.py --write`, {datetime.date.today()}, after commit {commit.stdout.strip()}.\n\n"


def generate(page: str) -> str:
    """Return the text of the page with the current table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + origin() + table() + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what each capability costs in lines.")
    parser.add_argument("--write", action="store_true", help="replace the table in CHANGELOG.md")
    if parser.parse_args().write:
        PAGE.write_text(generate(PAGE.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
