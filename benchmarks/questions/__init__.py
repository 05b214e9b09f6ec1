"""The open questions of docs/questions: one program each, which makes its picture."""
