"""Instructions that numba has no name for: sixty-four comparisons as one word, the bits of a word, a word at any byte,
stores that go round the cache, and memory that is wanted soon."""

import sys

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 64

_WORD = ir.IntType(32)
_WORDS = ir.VectorType(_WORD, LANES)


@intrinsic
def at_least(_context, bits, first, key):
    """Bit i says whether the magnitude in `bits[first + i]`, a float32 without its sign, is at least `key`."""

    def emit(context, builder, signature, arguments):
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), _WORDS.as_pointer())
        magnitudes = builder.and_(builder.load(place, align=4), ir.Constant(_WORDS, [0x7FFFFFFF] * LANES))
        nothing = ir.Constant(_WORDS, ir.Undefined)
        one = builder.insert_element(nothing, arguments[2], ir.Constant(_WORD, 0))
        keys = builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * LANES))
        # Signed, which processors have; no magnitude and no key uses the sign bit.
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, keys), ir.IntType(LANES))

    return types.uint64(bits, types.intp, types.uint32), emit


@intrinsic
def lowest_bit(_context, word):
    """The position of the lowest bit that is set, in a word that is not zero."""

    def emit(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), emit


@intrinsic
def count_bits(_context, word):
    """How many bits are set."""

    def emit(_context, builder, _signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), emit


@intrinsic
def ask_for(_context, values, place):
    """Have the memory around `values[place]` fetched, without waiting for it. It need not be there."""

    def emit(context, builder, signature, arguments):
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
        byte = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
        fetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), byte)
        reading, soon, data = (ir.Constant(_WORD, number) for number in (0, 3, 1))
        builder.call(fetch, [pointer, reading, soon, data])
        return context.get_dummy_value()

    return types.void(values, types.intp), emit


@intrinsic
def word_at(_context, data, first):
    """The eight bytes from `data[first]` on as one word, the first one lowest. They must be there."""

    def emit(context, builder, signature, arguments):
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        word = builder.load(place, align=1)
        return word if sys.byteorder == "little" else builder.bswap(word)

    return types.uint64(data, types.intp), emit


@intrinsic
def put_word(_context, data, first, word):
    """Make a word the eight bytes from `data[first]` on, the lowest one first. There must be room."""

    def emit(context, builder, signature, arguments):
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2] if sys.byteorder == "little" else builder.bswap(arguments[2]), place, align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), emit


@intrinsic
def stream_lanes(_context, values, to, source, first):
    """Copy the sixty-four floats from `source[first]` on to `values[to]`, whose address is a multiple of 32, round the
    cache: nothing is read there."""

    def emit(context, builder, signature, arguments):
        out, given = (
            cgutils.create_struct_proxy(signature.args[number])(context, builder, value=arguments[number]).data
            for number in (0, 2)
        )
        piece = ir.VectorType(ir.FloatType(), 8)
        for offset in range(0, LANES, 8):
            ahead = ir.Constant(arguments[1].type, offset)
            read_at, write_at = (
                builder.bitcast(builder.gep(data, [builder.add(place, ahead)]), piece.as_pointer())
                for data, place in ((given, arguments[3]), (out, arguments[1]))
            )
            store = builder.store(builder.load(read_at, align=4), write_at, align=32)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_WORD, 1)]))
        return context.get_dummy_value()

    return types.void(values, types.intp, source, types.intp), emit
