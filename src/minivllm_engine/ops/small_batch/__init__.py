"""Products of a few rows with weights stored as [out, in], fused with all that is around them.

A step of few rows is bound by reading each weight once. So every product is one kernel that reads nothing
else of any size: norms and gates of its input are computed anew by each of its programs.
"""
