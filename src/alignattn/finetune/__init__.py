"""`alignattn finetune`: a pretrained model and two tables in, a plain checkpoint and a result file out."""
