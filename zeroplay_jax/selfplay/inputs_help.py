"""Texts that `python -m zeroplay_jax.inputs --help` shows."""

EXAMPLES = """examples:
  python -m zeroplay_jax.inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl --out answers.jsonl
  python -m zeroplay_jax.inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --out questions.jsonl
  python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl.gz --count 100000 --out documents.jsonl
  python -m zeroplay_jax.inputs cloze --corpus texts --documents documents.jsonl --out held_out.jsonl

`python -m zeroplay_jax.inputs answers --help` explains one kind; the others in the same way.
"""
ANSWERS = """Answers that SSP's proposer hides.

--sets: a random sample of the first accepted answers of QA training questions, as in the paper (50,000 of NQ,
HotpotQA and others). Ours: no answer occurs twice in normal form, and yes, no and long answers are left out, because
no question can be written for which they are the only true answer.

--corpus: needs no questions at all. Candidates are the titles of the corpus, without brackets at their end and without
lists, and mentions that at least two documents share: dates, years, and names of two or more words, which are found by
their capitals (Latin script). No language model is used. The sample is uniform over distinct candidates.

Lines: {"answer", "source", "line"}; of a corpus also "kind" (title, entity, date) and "document_id".
"""
ANSWERS_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl --out answers.jsonl
  python -m zeroplay_jax.inputs answers --corpus wiki-18.jsonl.gz --count 50000 --out answers.jsonl
"""
QUESTIONS = """Questions with answers, for DSPO: several sets in one form, shuffled, each question once.

A set is a file, or one of nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle, which are downloaded.
Those are the held-out questions that papers report on: for config.eval.file and --not-in, not for training.

The answers may be in answers, golden_answers, answer, target, ground_truth, possible_answers or verl's reward_model, as
a text, a list, or an object of SQuAD or TriviaQA, with answer_aliases beside them; they become a list. Questions that
say that they have no answer are left out. A set is JSON lines, a TSV with headings or Parquet.

Lines: {"question", "answers", "source", "line"}, and "hops" if the set has them.
"""
QUESTIONS_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --out questions.jsonl
  python -m zeroplay_jax.inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl --count 5000 \\
      --not-in nq,hotpotqa --out questions.jsonl
  python -m zeroplay_jax.inputs questions --sets nq --out data/nq_test.jsonl
"""
DOCUMENTS = """Documents that a proposer starts from, with the number of hops (Dr. Zero, π-Play) or searches (SCOPE).

A uniform sample of the corpus. Hops are assigned exactly in the ratio, not drawn; a run uses the ratio of its config,
which should be the same. --types also assigns types of task, equally often; those of SCOPE are long_form_qa,
summarisation, planning and writing, and its table 6 leaves out one at a time.

Lines: {"title", "text", "source", "document_id", "line", "hops"}, and "type" with --types.
"""
DOCUMENTS_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl.gz --count 100000 --hops 4:3:2:1 --out documents.jsonl
  python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl.gz --count 30000 --hops 4:3:2 \\
      --types long_form_qa,summarisation,planning,writing --out documents.jsonl
"""
CLOZE = """Held-out questions for a corpus without any, and documents to train on, split by document.

A question is a sentence with a name or a number (failing that, a word) left out, written ____, and the answer is what
was left out. Sentences that occur twice are not asked about, nor what the title says. By default one question from
each passage; a small corpus gives several from each, and at most 40 % of its documents are held out. Up to a quarter
of the questions have two hops, if names connect enough documents for 20 of them: a sentence in which #1 replaces a
name, and a sentence of another document about #1 with a blank, which no search without the name finds. The training
documents are passages of all other documents, each with one hop, and with two hops those with a name about which
there is another document (Dr. Zero, π-Play); the name is their "link", shown to the proposer in brackets. A document
is a file of a folder of texts, or all passages with the same title; a corpus of fewer than five is split by passage.

A third file lists the passages of the held-out documents. With it as config.retrieval.held_out no search of a training
run returns them; evaluations search the whole corpus.

Lines of --out: {"question", "answers", "hops", "kind", "title", "source", "document_id", "line"}; of --documents as
`python -m zeroplay_jax.inputs documents` writes them, and "link"; of --held-out: {"document_id", "title"}.
"""
CLOZE_EXAMPLES = """examples:
  python -m zeroplay_jax.inputs cloze --corpus wiki-18.jsonl.gz --documents documents.jsonl --out held_out.jsonl
  python -m zeroplay_jax.inputs cloze --corpus texts --passage-words 80 --documents documents.jsonl --out held_out.jsonl
"""
