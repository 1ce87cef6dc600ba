"""What is the matter between keys and queries, head by head: `alignattn.diagnose` and the command of that name.

    batches ─▶ measure (mmd, permutation, moments, entropy, separation) ─▶ Diagnosis ─▶ words, tables, file
                                                        two of them ─▶ side_by_side

Nothing heavy is imported here: the command's --help is instant.
"""
