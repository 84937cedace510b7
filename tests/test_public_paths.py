"""The public names that scripts of version 3.0 import, held literally: path, arguments in order,
defaults."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

PUBLIC_NAMES = """
mlbench_core.aggregation.pytorch.aggregation
  class Aggregation(use_cuda=False)
    agg_grad(by_layer=False)
    agg_model(by_layer=False)
mlbench_core.aggregation.pytorch.centralized
  class AllReduceAggregation(world_size, divide_before=False, use_cuda=False)
  class PowerAggregation(model, use_cuda=False, reuse_query=False, world_size=1, rank=1)
    agg_model(by_layer=False)
  class SparsifiedAggregation(model, use_cuda=False)
mlbench_core.aggregation.pytorch.decentralized
  class DecentralizedAggregation(rank, neighbors, use_cuda=False)
mlbench_core.api
  class ApiClient(max_workers=5, in_cluster=True, label_selector='component=master,app=mlbench', k8s_namespace='default', url=None, load_config=True)
    create_run(name, num_workers, num_cpus=2.0, max_bandwidth=1000, image=None, backend=None, custom_image_name=None, custom_image_command=None, custom_backend=None, run_all_nodes=False, gpu_enabled=False, light_target=False)
    delete_run(run_id)
    download_run_metrics(run_id, since=None, summarize=None)
    get_all_metrics()
    get_pod_metrics(pod_id, since=None, summarize=None)
    get_run(run_id)
    get_run_metrics(run_id, since=None, summarize=None, metric_filter=None, last_n=None)
    get_runs()
    get_worker_pods()
    post_metric(run_id, name, value, cumulative=False, metadata='', date=None)
mlbench_core.cli
  cli, cli_group   (importable from here)
mlbench_core.cli.cli
  cli_group   (importable from here)
mlbench_core.controlflow.pytorch
  CheckpointsEvaluationControlFlow, compute_train_batch_metrics, prepare_batch, record_train_batch_stats, record_validation_stats, validation_round   (importable from here)
mlbench_core.controlflow.pytorch.checkpoints_evaluation
  class CheckpointsEvaluationControlFlow(ckpt_dir, rank, world_size, checkpointer, model, epochs, loss_function, metrics, use_cuda=False, dtype=None, max_batch_per_epoch=None)
    evaluate_by_epochs(dataloader)
mlbench_core.controlflow.pytorch.controlflow
  compute_train_batch_metrics(output, target, metrics)
  record_train_batch_stats(batch_idx, loss, output, metric_results, tracker, num_batches_per_device_train)
  record_validation_stats(metrics_values, loss, tracker=None, rank=0)
  validation_round(dataloader, model, loss_function, metrics, dtype, tracker=None, transform_target_type=False, use_cuda=False, max_batches=None)
mlbench_core.controlflow.pytorch.helpers
  convert_dtype(dtype, obj)
  iterate_dataloader(dataloader, dtype, max_batch_per_epoch=None, use_cuda=False, transform_target_type=False)
  maybe_range(maximum)
  prepare_batch(data, target, dtype, transform_target_dtype=False, use_cuda=False)
mlbench_core.controlflow.pytorch.train_validation
  class TrainValidation(model, optimizer, loss_function, metrics, scheduler, batch_size, train_epochs, rank, world_size, run_id, dtype, validate=True, schedule_per='epoch', checkpoint=None, transform_target_type=None, average_models=False, use_cuda=False, max_batch_per_epoch=None, tracker=None)
    run(dataloader_train=None, dataloader_val=None, dataloader_train_fn=None, dataloader_val_fn=None, resume=False, repartition_per_epoch=False)
  train_round(dataloader, model, optimizer, loss_function, metrics, scheduler, dtype, schedule_per='epoch', transform_target_type=None, use_cuda=False, max_batch_per_epoch=None, tracker=None)
mlbench_core.dataset.imagerecognition.pytorch
  CIFAR10V1   (importable from here)
mlbench_core.dataset.imagerecognition.pytorch.dataloader
  class CIFAR10V1(root, train=True, download=False)
  class Imagenet(root, train=True)
mlbench_core.dataset.linearmodels.pytorch
  LMDBDataset   (importable from here)
mlbench_core.dataset.linearmodels.pytorch.dataloader
  class LMDBDataset(name, data_type, root, target_transform=None)
mlbench_core.dataset.nlp.pytorch
  WMT16Dataset, WMT17Dataset, Wikitext2Dataset, build_collate_fn, get_batches   (importable from here)
mlbench_core.dataset.nlp.pytorch.wikitext2_dataset
  class Dictionary()
    add_word(word)
  class Wikitext2Dataset(path, bptt, train=False, valid=False, test=False, min_seq_len=5)
    generate_batches(global_bsz, worker_bsz=None, rank=0)
    generate_sequence_lengths(random=False)
    get_batch(i, cuda=False)
    num_batches()
mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer
  class WMT16Tokenizer(base_dir, math_precision=None, separator='@@')
    detokenize(inputs, delim=' ')
    segment(line)
mlbench_core.dataset.nlp.pytorch.wmt16_dataset
  class WMT16Dataset(root, lang=('en', 'de'), math_precision=None, download=True, train=False, validation=False, lazy=False, preprocessed=False, sort=False, min_len=0, max_len=None, max_size=None)
mlbench_core.dataset.nlp.pytorch.wmt17.batching
  get_batches(dataset, max_tokens=None, max_sentences=None, bsz_mult=8, shuffle=True, seed=0)
mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary
  class Dictionary(pad='<pad>_', eos='<EOS>_')
    eos()
    index(sym)
    pad()
    string(tensor, bpe_symbol=None)
mlbench_core.dataset.nlp.pytorch.wmt17_dataset
  class WMT17Dataset(root, lang=('en', 'de'), download=False, train=False, validation=False, test=False, left_pad=(True, False), max_positions=(256, 256), seq_len_multiple=1, shuffle=True)
    collater(samples)
mlbench_core.dataset.util.pytorch
  Partitioner, partition_dataset_by_rank   (importable from here)
mlbench_core.dataset.util.pytorch.libsvm
  LIBSVMDataset, generate_lmdb_from_libsvm   (importable from here)
mlbench_core.dataset.util.pytorch.partition
  class DataPartitioner(data, rank, shuffle, sizes=[0.7, 0.2, 0.1])
    use(partition_ind)
  class Partition(data, indices)
  partition_dataset_by_rank(dataset, rank, world_size, distribution='uniform', shuffle=True)
mlbench_core.dataset.util.tools
  maybe_download_and_extract_bz2(root, file_name, data_url)
  maybe_download_and_extract_tar_gz(root, file_name, data_url)
  maybe_download_and_extract_zip(root, file_name, data_url)
  progress_download(url, dest)
mlbench_core.evaluation.goals
  task1_time_to_accuracy_goal()
  task1_time_to_accuracy_light_goal()
  task2_time_to_accuracy_goal()
  task2_time_to_accuracy_light_goal()
  task3_time_to_perplexity_goal(threshold=70)
  task4_time_to_bleu_goal(threshold=24)
  time_to_accuracy_goal(threshold)
mlbench_core.evaluation.pytorch
  criterion, metrics   (importable from here)
mlbench_core.evaluation.pytorch.criterion
  class BCELossRegularized(weight=None, size_average=None, reduce=None, l1=0.0, l2=0.0, model=None, reduction='mean')
    forward(input_, target)
  class LabelSmoothing(padding_idx, smoothing=0.0, fast_xentropy=False)
    forward(x, target)
  class MSELossRegularized(weight=None, size_average=None, reduce=None, l1=0.0, l2=0.0, model=None, reduction='mean')
    forward(input_, target)
mlbench_core.evaluation.pytorch.metrics
  class BLEUScore(use_raw=False)
    name (a property)
  class DiceCoefficient()
    name (a property)
  class F1Score(threshold=0.5, eps=1e-09)
    name (a property)
  class MLBenchMetric()
    average()
    reset()
    update(perc, size)
  class Perplexity()
    name (a property)
  class TopKAccuracy(topk=1)
    name (a property)
mlbench_core.lr_scheduler.pytorch
  ExponentialWarmupMultiStepLR, LRLinearWarmUp, MultiStepLRLinearWarmUp, PolyDecayLRLinearWarmup   (importable from here)
  ReduceLROnPlateauWithWarmup, SQRTTimeDecayLR, SQRTTimeDecayLRWithWarmup, SparsifiedSGDLR   (importable from here)
  TimeDecayLR, lr   (importable from here)
mlbench_core.lr_scheduler.pytorch.lr
  class ExponentialWarmupMultiStepLR(optimizer, iterations, warmup_steps=0, remain_steps=1.0, decay_interval=None, decay_steps=4, decay_factor=0.5)
  class LRLinearWarmUp(optimizer, init_lr, scaled_lr, warmup_duration)
  class MultiStepLRLinearWarmUp(optimizer, gamma, milestones, scaled_lr, warmup_init_lr=0, warmup_duration=0)
  class PolyDecayLRLinearWarmup(optimizer, init_lr, scaled_lr, warmup_duration, decay_steps, min_lr=0, power=2)
  class ReduceLROnPlateauWithWarmup(optimizer, warmup_init_lr, scaled_lr, warmup_epochs, batches_per_epoch=None)
    batch_step()
    step(metrics, epoch=None)
  class SQRTTimeDecayLR(optimizer)
  class SQRTTimeDecayLRWithWarmup(optimizer, base_lr, warmup_init_lr, warmup_steps)
  class SparsifiedSGDLR(optimizer, gamma, l2_coef, shifting_param)
  class TimeDecayLR(optimizer, beta)
mlbench_core.models.pytorch.gnmt
  GNMT, Translator   (importable from here)
mlbench_core.models.pytorch.gnmt.models
  class GNMT(vocab_size, hidden_size=1024, num_layers=4, dropout=0.2, share_embedding=True, fusion=True)
    forward(input_encoder, input_enc_len, input_decoder)
mlbench_core.models.pytorch.gnmt.translator
  class Translator(model, trg_tokenizer, trg_lang='de', beam_size=5, len_norm_factor=0.6, len_norm_const=5.0, cov_penalty_factor=0.1, max_seq_len=150)
    translate(src, trg)
mlbench_core.models.pytorch.language_models
  LSTMLanguageModel   (importable from here)
mlbench_core.models.pytorch.language_models.lstm
  class LSTMLanguageModel(ntoken, ninp, nhid, nlayers, dropout=0.5, dropouth=0.5, dropouti=0.5, dropoute=0.1, wdrop=0, tie_weights=False)
    forward(input, hidden, return_h=False)
    init_hidden(bsz)
mlbench_core.models.pytorch.layers.dropout_layers
  class LockedDropout(p=0.5)
    forward(x)
  class WeightDrop(module, weights, dropout=0)
    forward()
  embedded_dropout(embed, words, dropout=0.1, scale=None)
mlbench_core.models.pytorch.linear_models
  class LinearRegression(n_features)
    forward(x)
  class LogisticRegression(n_features)
    forward(x)
mlbench_core.models.pytorch.resnet
  BasicBlockV1, BasicBlockV2, ResNet18CIFAR10   (importable from here)
  class ResNetCIFAR(resnet_size, bottleneck, num_classes, version=_DEFAULT_RESNETCIFAR_VERSION)
    forward(x)
  get_resnet_model(model, version, dtype, num_classes=1000, use_cuda=False)
  resnet18_bkj(num_classes)
mlbench_core.models.pytorch.transformer
  SequenceGenerator, TransformerModel   (importable from here)
mlbench_core.models.pytorch.transformer.modules.multihead_attention
  class MultiheadAttention(embed_dim, num_heads, dropout=0.0, softmax_type='default', bias=False)
    forward(query, key, value, mask_future_timesteps=False, key_padding_mask=None, incremental_state=None, need_weights=True, static_kv=False)
mlbench_core.models.pytorch.transformer.sequence_generator
  class SequenceGenerator(model, src_dict, trg_dict, beam_size=1, minlen=1, maxlen=None, stop_early=True, normalize_scores=True, len_penalty=1, retain_dropout=False, sampling=False, sampling_topk=-1, sampling_temperature=1)
    translate_batch(batch, maxlen_a=1.0, maxlen_b=50, prefix_size=0, remove_bpe=None, nbest=1, ignore_case=True)
mlbench_core.models.pytorch.transformer.transformer
  class TransformerModel(args, src_dict, trg_dict)
    forward(src_tokens, src_lengths, prev_output_tokens)
mlbench_core.models.pytorch.vgg
  class VGG(vgg_name)
    forward(x)
mlbench_core.optim.pytorch
  optimizers   (importable from here)
  get_optimizer(optimizer)
mlbench_core.optim.pytorch.centralized
  class CentralizedAdam(world_size=None, model=None, lr=required, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, amsgrad=False, use_cuda=False, by_layer=False, agg_grad=True)
  class CentralizedSGD(world_size=None, model=None, lr=required, momentum=0, dampening=0, weight_decay=0, nesterov=False, use_cuda=False, by_layer=False, agg_grad=True)
  class CentralizedSparsifiedSGD(params=None, lr=required, weight_decay=0, sparse_grad_size=10, random_sparse=False, world_size=1, average_world=True)
    step(closure=None)
  class CustomCentralizedOptimizer(model, world_size, optimizer, use_cuda=False, by_layer=False, agg_grad=True, grad_clip=float('inf'), average_world=False, average_custom=False, divide_before=False)
    step(closure=None, tracker=None, denom=None)
  class GenericCentralizedOptimizer(world_size, model, use_cuda=False, by_layer=False, divide_before=False, agg_grad=True)
    step(closure=None, tracker=None)
    zero_grad()
  class PowerSGD(model=None, lr=required, momentum=0, weight_decay=0, dampening=0, nesterov=False, average_world=True, use_cuda=False, by_layer=False, reuse_query=False, world_size=1, rank=1)
    step(closure=None, tracker=None)
mlbench_core.optim.pytorch.decentralized
  class DecentralizedSGD(rank=None, neighbors=None, model=None, lr=required, momentum=0, dampening=0, weight_decay=0, nesterov=False, average_world=True, use_cuda=False, by_layer=False)
    step(closure=None, tracker=None)
mlbench_core.optim.pytorch.fp_optimizers
  class DynamicLossScaler(init_scale=2.0 ** 15, scale_factor=2.0, scale_window=2000, max_scale=None)
    has_overflow(grad_norm)
    update_scale(overflow)
  class FP16Optimizer(fp16_model, world_size, use_cuda=False, use_horovod=False, by_layer=False, grad_clip=float('inf'), init_scale=1024, scale_factor=2, scale_window=128, max_scale=None, min_scale=0.0001, average_world=False, average_custom=False, divide_before=False)
    backward_loss(loss)
    set_optimizer(optimizer)
    step(closure=None, tracker=None, multiplier=1, denom=None)
    zero_grad()
mlbench_core.optim.pytorch.optim
  class SignSGD(params, lr, momentum=0, weight_decay=0, dampening=0, nesterov=False)
    step(closure=None)
  class SparsifiedSGD(params, lr=required, weight_decay=0, sparse_grad_size=10)
    get_estimated_weights()
    step(closure=None)
    update_estimated_weights()
mlbench_core.utils
  AverageMeter, LogMetrics, Tracker   (importable from here)
mlbench_core.utils.log_metrics
  class LogMetrics()
    log(run_id, rank, epoch, metric_name, value)
mlbench_core.utils.pytorch
  FCGraph, config_logging, config_path, config_pytorch   (importable from here)
  initialize_backends(comm_backend='mpi', hosts=None, rank=-1, logging_level='INFO', logging_file='/mlbench.log', use_cuda=False, seed=None, cudnn_deterministic=False, ckpt_run_dir='/checkpoints', delete_existing_ckpts=False)
mlbench_core.utils.pytorch.checkpoint
  class CheckpointFreq()
  class Checkpointer(ckpt_run_dir, rank, freq=CheckpointFreq.BEST, save_stats=True)
    checkpoint_exists(ckpt_run_dir, rank, epoch)
    load(ckpt_run_dir, rank, model, optimizer, scheduler)
    load_model_by_epoch(ckpt_run_dir, rank, epoch, model)
    save(tracker, model, optimizer, scheduler, is_best)
  determine_restore_ckpt_path(rank, checkpoint_root, run_id)
mlbench_core.utils.pytorch.distributed
  get_backend_tensor(tensor)
  global_average(sum, count)
mlbench_core.utils.pytorch.helpers
  config_logging(logging_level='INFO', logging_file='/mlbench.log')
  config_path(ckpt_run_dir, delete_existing_ckpts=False)
  config_pytorch(use_cuda=False, seed=None, cudnn_deterministic=False)
mlbench_core.utils.pytorch.inference.beam_search
  class SequenceGenerator(model, beam_size=5, max_seq_len=100, len_norm_factor=0.6, len_norm_const=5, cov_penalty_factor=0.1)
    beam_search(batch_size, initial_input, initial_context=None)
    greedy_search(batch_size, initial_input, initial_context=None)
mlbench_core.utils.pytorch.topology
  class FCGraph(rank, world_size, use_cuda=False)
    assigned_gpu_id()
    current_device (a property)
    current_device_name (a property)
mlbench_core.utils.pytorch.utils
  orthogonalize(matrix, eps=torch.FloatTensor([1e-16]))
  pack_tensors(tensors, use_cuda=False)
  unpack_tensors(aggregated, indices, sizes)
mlbench_core.utils.task_args
  task_main(main_func, uid='allreduce')
mlbench_core.utils.tracker
  class AverageMeter()
    reset()
    update(val, n=1)
  class Tracker(metrics, run_id, rank, goal=None, communication_steps=None, compute_steps=None, metrics_steps=None, preprocess_steps=None, minimize=False)
    batch_end()
    batch_start()
    epoch_end()
    get_total_communication_time()
    get_total_compute_time()
    get_total_metrics_time()
    get_total_preprocess_time()
    get_total_train_time()
    get_total_val_time()
    is_best()
    record_batch_agg()
    record_batch_backprop()
    record_batch_comp_loss()
    record_batch_comp_metrics()
    record_batch_fwd_pass()
    record_batch_init()
    record_batch_load()
    record_batch_opt_step()
    record_batch_step(name)
    record_loss(value, n=1, log_to_api=False)
    record_metric(metric, value, n=1, log_to_api=False)
    record_stat(name, value, n=1, log_to_api=False)
    reset_epoch_stats()
    start()
    train()
    update_primary_metric(new_metric_value)
    validation()
    validation_end()
    validation_start()
"""

# Defaults that are different on purpose, because the old ones were defects or no plain values.
OTHER_DEFAULTS = {
    "logging_file": "a path at the root of the disk",
    "ckpt_run_dir": "a path at the root of the disk",
    "eps=torch": "a tensor made at import",
    "version": "a private constant",
    "lr": "torch's marker for a required argument",
}


@dataclass(frozen=True)
class PublicName:
    """One name of the list: where it is and what it takes (None: only that it can be imported)."""

    module: str
    name: str
    arguments: str | None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def read_list() -> Iterator[PublicName]:
    """Read the indented list."""
    module = owner = ""
    for line in PUBLIC_NAMES.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        text = line.strip()
        if depth == 0:
            module = text
        elif text.endswith("(importable from here)"):
            for name in text.removesuffix("(importable from here)").split(","):
                yield PublicName(module, name.strip(), None)
        elif match := re.fullmatch(r"(\w+) \(a property\)", text):
            yield PublicName(module, f"{owner}.{match[1]}", None)
        elif match := re.fullmatch(r"(class )?(\w+)\((.*)\)", text):
            name = match[2] if depth == 1 else f"{owner}.{match[2]}"
            if depth == 1:
                owner = match[2]
            yield PublicName(module, name, match[3])
        else:
            raise ValueError(f"cannot read {line!r}")


@pytest.mark.parametrize("name", list(read_list()), ids=str)
def test_name_is_there_and_takes_its_arguments(name: PublicName) -> None:
    found: object = importlib.import_module(name.module)
    for part in name.name.split("."):
        if not hasattr(found, part) and name.arguments is None:
            found = importlib.import_module(f"{name.module}.{part}")
        else:
            found = getattr(found, part)
    if name.arguments is None or (isinstance(found, type) and issubclass(found, enum.Enum)):
        return
    expected = ast.parse(f"def f({name.arguments}): pass").body[0].args  # type: ignore[attr-defined]
    parameters = [
        p for p in inspect.signature(found).parameters.values() if p.name not in ("self", "cls")
    ]  # type: ignore[arg-type]
    names = [argument.arg for argument in expected.args]
    taken = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert taken[: len(names)] == names
    for argument, default in zip(
        names[len(names) - len(expected.defaults) :], expected.defaults, strict=True
    ):
        parameter = next(p for p in parameters if p.name == argument)
        assert parameter.default is not inspect.Parameter.empty, f"{argument} has no default"
        text = ast.unparse(default)
        if argument in OTHER_DEFAULTS or f"{argument}={text.split('.')[0]}" in OTHER_DEFAULTS:
            continue
        scope = {
            "float": float,
            "CheckpointFreq": getattr(inspect.getmodule(found), "CheckpointFreq", None),
        }
        value = eval(text, scope)
        actual = tuple(parameter.default) if isinstance(value, list) else parameter.default
        assert actual == (tuple(value) if isinstance(value, list) else value), argument
    for p in parameters[len(names) :]:
        assert p.default is not inspect.Parameter.empty or p.kind in (
            p.VAR_POSITIONAL,
            p.VAR_KEYWORD,
        ), f"the new argument {p.name} has no default"
