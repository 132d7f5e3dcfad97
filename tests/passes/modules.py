"""Hand-made modules, small enough to count by eye."""

EVERYTHING = b"""
declare i32 @known(i32, i64)
declare void @nothing()

define i32 @f(i32 %x, i1 %c, ptr %p) {
entry:
  %slot = alloca i32
  store i32 0, ptr %slot
  switch i32 %x, label %left [ i32 0, label %right
                               i32 1, label %right ]

left:
  %a = add i32 %x, 1
  %s = sub i32 7, %a
  %m = mul i32 %s, %s
  %l = shl i32 %m, 2
  %r = lshr i32 %l, 3
  %q = ashr i32 %r, 1
  %n = and i32 %q, %x
  %o = or i32 %n, %x
  %e = xor i32 %o, -1
  br label %join

right:
  %g = getelementptr i8, ptr %p, i64 1
  %v = load i32, ptr %g
  %b = bitcast i32 %v to float
  %t = trunc i32 %v to i8
  %z = zext i8 %t to i64
  %w = sext i8 %t to i64
  %k = call i32 @known(i32 %v, i64 %w)
  call void @nothing()
  br i1 %c, label %join, label %right2

right2:
  %i = icmp eq i32 %k, 0
  %h = select i1 %i, i1 true, i1 false
  br i1 %h, label %join, label %join

join:
  %phi = phi i32 [ %e, %left ], [ %k, %right ], [ 5, %right2 ], [ 5, %right2 ]
  ret i32 %phi
}
"""

# Blocks: entry (3 instructions, no edge in, 3 out: left, right, right), left (1 in, 1 out), right (2 in, 2 out),
# right2 (1 in, 2 out, both to join), join (4 in, none out).
EVERYTHING_FEATURES = {
    "BBNumArgsHi": 0,
    "BBNumArgsLo": 1,
    "onePred": 2,
    "onePredOneSuc": 1,
    "onePredTwoSuc": 1,
    "oneSuccessor": 1,
    "twoPred": 1,
    "twoPredOneSuc": 0,
    "twoEach": 1,
    "twoSuccessor": 2,
    "morePreds": 1,
    "BB03Phi": 1,
    "BBHiPhi": 0,
    "BBNoPhi": 4,
    "BeginPhi": 1,
    "BranchCount": 3,
    "returnInt": 1,
    "CriticalCount": 5,  # entry -> right twice, right -> join, right2 -> join twice
    "NumEdges": 8,
    "const32Bit": 13,  # alloca 1, store 0, cases 0 and 1, then 1 7 2 3 1 -1, 0 of icmp, 5 twice
    "const64Bit": 1,
    "numConstZeroes": 4,
    "numConstOnes": 6,
    "UncondBranches": 1,
    "binaryConstArg": 6,
    "NumAShrInst": 1,
    "NumAddInst": 1,
    "NumAllocaInst": 1,
    "NumAndInst": 1,
    "BlockMid": 0,
    "BlockLow": 5,
    "NumBitCastInst": 1,
    "NumBrInst": 3,
    "NumCallInst": 2,
    "NumGetElementPtrInst": 1,
    "NumICmpInst": 1,
    "NumLShrInst": 1,
    "NumLoadInst": 1,
    "NumMulInst": 1,
    "NumOrInst": 1,
    "NumPHIInst": 1,
    "NumRetInst": 1,
    "NumSExtInst": 1,
    "NumSelectInst": 1,
    "NumShlInst": 1,
    "NumStoreInst": 1,
    "NumSubInst": 1,
    "NumTruncInst": 1,
    "NumXorInst": 1,
    "NumZExtInst": 1,
    "TotalBlocks": 5,
    "TotalInsts": 27,
    "TotalMemInst": 6,
    "TotalFuncs": 3,
    "ArgsPhi": 4,
    "testUnary": 6,
}

# Constants are kept wider than 64 bits, and a callee called as something else is no known function.
ODDITIES = b"""
declare i32 @known()

define i128 @wide(i128 %x) {
  %a = add i128 %x, 18446744073709551616
  %b = add i128 %a, 0
  %c = add i128 %b, 1
  %d = call i64 @known()
  ret i128 %c
}
"""

# Enough work in one function that -Oz takes a while.
HEAVY = (
    b"declare void @use(i32)\ndefine void @f(i32 %x0) {\n"
    + b"".join(
        b"  %%x%d = mul i32 %%x%d, %%x%d\n  call void @use(i32 %%x%d)\n" % (i + 1, i, i // 2, i + 1)
        for i in range(4000)
    )
    + b"  ret void\n}\n"
)

# One `dead` pair of instructions, and one that only shows when the slot has become a value.
SMALL = b"""
define i32 @f(i32 %x) {
  %slot = alloca i32
  store i32 %x, ptr %slot
  %dead = add i32 %x, 1
  %v = load i32, ptr %slot
  %n = xor i32 %v, -1
  %m = xor i32 %n, -1
  ret i32 %m
}
"""
