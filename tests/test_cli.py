"""`python -m llm_lessons`: it answers, says how long both jobs took, and ends every wrong turn with one clear line."""

import os
import re
import signal
import subprocess
import sys

import pytest

import llm_lessons as ll
from llm_lessons import __main__ as cli

QUESTION = "How does inference work?"
TIMES = re.compile(r"""
prefill  (?P<prompt>\d+) tokens, time to first token \(TTFT\) (?P<ttft>\d+) ms: \d+ tokens/s
decode   (?P<rest>\d+) tokens, time per output token \(TPOT\) (?P<tpot>[\d.]+) ms: [\d.]+ tokens/s
finish reason: (?P<reason>\w+)
$""")


def command(*arguments, **environment):
    return dict(args=[sys.executable, "-m", "llm_lessons", *arguments], env=os.environ | environment)


@pytest.fixture
def loaded(smollm2, monkeypatch):
    """The command's model is the one already in memory."""
    monkeypatch.setattr(cli, "load_pretrained", lambda name: smollm2)
    return smollm2


# --- Answers --------------------------------------------------------------------------------------------------------

def test_the_command_answers_and_tells_the_times_of_both_jobs(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer.chat([{"role": "user", "content": QUESTION}])
    done = subprocess.run(**command(QUESTION, "--max-new-tokens", "8"), capture_output=True, timeout=120)
    output = done.stdout.decode()
    assert done.returncode == 0 and done.stderr == b""
    times = TIMES.search(output)
    assert output[:times.start()] == tokenizer.decode(ll.generate(model, ids, 8)) + "\n"
    assert (times["prompt"], times["rest"], times["reason"]) == (str(len(ids)), "7", "length")
    assert int(times["ttft"]) > 0 and float(times["tpot"]) > 0


def test_an_answer_that_ends_by_itself_says_stop(loaded, capsys):
    assert cli.main(["What is the capital of France? Answer with one word.", "--max-new-tokens", "200"]) == 0
    output = capsys.readouterr().out
    assert TIMES.search(output)["reason"] == "stop"
    assert "<|im_end|>" not in output


def test_a_reader_who_stops_reading_ends_it_without_a_traceback():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(**command(QUESTION, "--max-new-tokens", "60"), **pipes)
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(120) == 1


def test_one_token_has_no_decode_line(loaded, capsys):
    assert cli.main([QUESTION, "--max-new-tokens", "1"]) == 0
    output = capsys.readouterr().out
    assert "prefill" in output and "decode" not in output and "TPOT" not in output


def test_the_arithmetic_of_the_summary():
    assert cli.summary(30, [1.5, 0.1, 0.2, 0.3], "length") == (
        "\nprefill  30 tokens, time to first token (TTFT) 1500 ms: 20 tokens/s"  # 30 / 1.5
        "\ndecode   3 tokens, time per output token (TPOT) 200.0 ms: 5.0 tokens/s"  # 3 / 0.6: the first is prefill's
        "\nfinish reason: length")
    assert cli.summary(10, [0.25], "stop") == (
        "\nprefill  10 tokens, time to first token (TTFT) 250 ms: 40 tokens/s\nfinish reason: stop")


def test_fetch_says_where_the_model_is_and_asks_nothing(gguf_path, capsys):
    assert cli.main(["--fetch"]) == 0
    assert str(gguf_path.parent) in capsys.readouterr().out


# --- Wrong turns ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments", [[], [""], [QUESTION, "--max-new-tokens", "many"], [QUESTION, "--nonsense"]],
                         ids=str)
def test_wrong_usage_is_explained(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m llm_lessons" in (told := capsys.readouterr()).err and told.out == ""


@pytest.mark.parametrize("arguments, message", [
    ([QUESTION, "--model", "gpt-17"], "there is no model 'gpt-17'"),
    ([QUESTION, "--model", "/no/such/folder"], "there is no model '/no/such/folder'"),
    ([QUESTION, "--max-new-tokens", "0"], "max_new_tokens must be a whole number of at least 1, not 0"),
    (["hm " * 9000], "does not fit the context window of 8192"),
    (["a\x04b"], "U+0004")], ids=["unknown model", "no folder", "no tokens", "too long", "no such character"])
def test_what_cannot_be_done_is_one_line_and_exit_code_1(arguments, message, smollm2, monkeypatch, capsys):
    if "--model" not in arguments:
        monkeypatch.setattr(cli, "load_pretrained", lambda name: smollm2)
    assert cli.main(arguments) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and told.err.count("\n") == 1
    assert message in told.err


def test_a_failed_download_is_told_and_not_a_traceback(monkeypatch, capsys):
    def fails(self):
        raise ll.DownloadError("no network")

    monkeypatch.setattr(type(cli.SMOLLM2), "fetch", fails)
    assert cli.main(["--fetch"]) == 1
    assert capsys.readouterr().err == "error: no network\n"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_interrupting_an_answer_still_tells_the_times():
    process = subprocess.Popen(**command("Tell me a very long story.", "--max-new-tokens", "4000"),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               # A shell's background job ignores the signal, and so would its children.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        begun = process.stdout.read(20)  # the answer is under way
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert len(begun) == 20 and b"Traceback" not in errors and errors.strip() == b"stopped"
    assert TIMES.search(rest.decode())["reason"] == "cancelled"


def test_a_terminal_without_the_characters_of_the_answer_shows_question_marks():
    """An answer with a character beyond ASCII must not end in a UnicodeEncodeError."""
    done = subprocess.run(**command("Say é ü 日本 🦙 back to me.", "--max-new-tokens", "12", PYTHONIOENCODING="ascii"),
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stderr == b""
    assert b"?" in done.stdout and TIMES.search(done.stdout.decode("ascii"))
