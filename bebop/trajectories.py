"""``trajectories.sqlite`` of a run: every answer that was trained on, and how the tokens of those traced came about.

One file, a transaction a step, so that a reader beside a running job sees whole steps. Arrays are little-endian blobs
of one number a token (``[T, M]`` row by row), as ``numpy.frombuffer`` reads them.
"""

NAME = "trajectories.sqlite"
FORMAT = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);  -- format, mode (of monitor.trace), top (M)
CREATE TABLE prompts (
  prompt INTEGER PRIMARY KEY,   -- its number in the prompt stream
  task TEXT NOT NULL,
  text TEXT NOT NULL,           -- after the chat template
  ids BLOB NOT NULL             -- int32 [P]
);
CREATE TABLE answers (
  id INTEGER PRIMARY KEY,       -- prompt * group size + member
  step INTEGER NOT NULL,        -- the update that it was trained in, from 1
  prompt INTEGER NOT NULL,
  member INTEGER NOT NULL,      -- its place in the group, from 0
  system TEXT NOT NULL,         -- the decoding system in force when it was taken in
  reward REAL NOT NULL,
  timed_out INTEGER NOT NULL,
  length INTEGER NOT NULL,      -- T
  finish TEXT NOT NULL,         -- stop, length, abort
  version_first INTEGER NOT NULL,  -- weights of its first and of its last token
  version_last INTEGER NOT NULL,
  staleness INTEGER NOT NULL,   -- updates between its oldest token's weights and those it trains
  accept_length REAL,           -- tokens a cycle; NULL: not known
  accept_rate REAL,             -- accepted drafts over tested ones, all positions; NULL: none was tested
  overlap REAL,                 -- mean of sum min(p, q) over tested positions; NULL: not measured
  target_entropy REAL,          -- nats, over tested positions; NULL: not measured
  exact INTEGER NOT NULL,
  traced INTEGER NOT NULL,      -- whether ``tokens`` has the columns of ``bebop.token_trace.Trace`` for it
  text TEXT NOT NULL
);
CREATE INDEX answers_step ON answers (step);
CREATE INDEX answers_prompt ON answers (prompt);
CREATE TABLE tokens (
  answer INTEGER PRIMARY KEY,
  ids BLOB NOT NULL,            -- int32 [T]
  logprobs BLOB NOT NULL,       -- float32 [T], the engine's log p
  versions BLOB NOT NULL,       -- int32 [T]
  trainer_logprobs BLOB,        -- float32 [T], the trainer's log p at the start of the update; NULL: not kept
  drafter_names TEXT,           -- JSON list; this and what follows as in ``Trace``; NULL: not traced
  verdicts BLOB,                -- int8 [T]
  cycles BLOB,                  -- int32 [T]
  drafters BLOB,                -- int8 [T]
  drafts BLOB,                  -- int32 [T]
  draft_target_probs BLOB,      -- float32 [T]
  draft_probs BLOB,             -- float32 [T]
  overlap BLOB,                 -- float32 [T]
  target_entropy BLOB,          -- float32 [T]
  draft_entropy BLOB,           -- float32 [T]
  target_ids BLOB,              -- int32 [T, M]
  target_top BLOB,              -- float16 [T, M]
  draft_ids BLOB,               -- int32 [T, M]
  draft_top BLOB                -- float16 [T, M]
);
CREATE TABLE pieces (id INTEGER PRIMARY KEY, text TEXT NOT NULL);  -- the text of each token id that occurs above
"""
