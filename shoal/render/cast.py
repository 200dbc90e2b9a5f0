"""Ray casting: traversal of the packed tree (see `scene.pack`), and texture lookups."""

from typing import no_type_check

import warp as wp

from shoal.scene.memory import CENTER
from shoal.scene.pack import ATTRIBUTE_WORDS, LEAF_BITS, MATERIAL_WORDS, NODE_WORDS, TRIANGLE_WORDS
from shoal.scene.tree import STACK

# Only this package fuses sums and products: speed of rays matters more than equal last bits on CPU and GPU.
wp.set_module_options({"enable_backward": False})

NODES, TRIANGLES, ATTRIBUTES, MATERIALS, TEXELS = 0, 1, 2, 3, 4
"""Columns of the table of scenes; each holds the first word of a section."""

Words = wp.array(dtype=wp.vec4)
Table = wp.array2d(dtype=int)

_TRIANGLE = wp.constant(TRIANGLE_WORDS)
_ATTRIBUTE = wp.constant(ATTRIBUTE_WORDS)
_MATERIAL = wp.constant(MATERIAL_WORDS)

EDGE = 1e-5
"""Fraction of its size by which a triangle extends over its edges, so that no ray passes between two triangles."""

# The only loop that is not Python: Warp clears local arrays, and clearing a stack of 512 bytes per ray would cost as
# much as the traversal. It is plain C++, for CPUs and GPUs.
TRAVERSAL = f"""
    struct Word {{ float x, y, z, w; }};
    struct Entry {{ int child; float distance; }};
#if defined(__CUDA_ARCH__)
    const float4* data = reinterpret_cast<const float4*>(words.data);
    #define SHOAL_READ(index) __ldg(data + (index))
#else
    const Word* data = reinterpret_cast<const Word*>(words.data);
    #define SHOAL_READ(index) data[index]
#endif
    const float ox = origin[0], oy = origin[1], oz = origin[2];
    const float dx = direction[0], dy = direction[1], dz = direction[2];
    // Avoids 0 x inf in box tests of rays along an axis.
    const float ix = 1.0f / (wp::abs(dx) < 1e-12f ? 1e-12f : dx);
    const float iy = 1.0f / (wp::abs(dy) < 1e-12f ? 1e-12f : dy);
    const float iz = 1.0f / (wp::abs(dz) < 1e-12f ? 1e-12f : dz);
    const float sx = -ox * ix, sy = -oy * iy, sz = -oz * iz;
    // By axis, the word of a node with the nearer sides of the boxes.
    const int ax = ix < 0.0f ? 1 : 0, ay = iy < 0.0f ? 3 : 2, az = iz < 0.0f ? 5 : 4;
    const int bx = 1 - ax, by = 5 - ay, bz = 9 - az;
    const float NEVER = 3e38f;
    // The next child that begins before the nearest hit.
    #define SHOAL_NEXT \\
        at = DONE; \\
        while (count > 0) {{ \\
            --count; \\
            if (stack[count].distance <= best) {{ at = stack[count].child; break; }} \\
        }}
    float best = far, best_u = 0.0f, best_v = 0.0f;
    int nearest = -1;
    Entry stack[{STACK} + 1];  // the last entry is scratch
    int count = 0;
    int at = 0;
    const int DONE = -1;
    while (at != DONE) {{
        // Descend to the next leaf. On a GPU the rays of a warp first descend together, then test triangles together.
        while (at >= 0) {{
            const int node = nodes + at * {NODE_WORDS};
            const auto nx = SHOAL_READ(node + ax), fx = SHOAL_READ(node + bx);
            const auto ny = SHOAL_READ(node + ay), fy = SHOAL_READ(node + by);
            const auto nz = SHOAL_READ(node + az), fz = SHOAL_READ(node + bz);
            const auto children = SHOAL_READ(node + 6);
            #define SHOAL_BOX(k, t, c) \\
                int c = wp::cast<int>(children.k); \\
                float t = wp::max(wp::max(nx.k * ix + sx, ny.k * iy + sy), wp::max(nz.k * iz + sz, 1e-30f)); \\
                const float t##_z = wp::min(wp::min(fx.k * ix + sx, fy.k * iy + sy), wp::min(fz.k * iz + sz, best)); \\
                if (!(t <= t##_z)) t = NEVER;
            SHOAL_BOX(x, t0, c0)
            SHOAL_BOX(y, t1, c1)
            SHOAL_BOX(z, t2, c2)
            SHOAL_BOX(w, t3, c3)
            // Sort the four children by distance; visit the nearest, push the others.
            // The sorting network has no branches, at which the rays of a warp would diverge.
            #define SHOAL_SORT(i, j) {{ \\
                const bool swap = t##j < t##i; \\
                const float t = swap ? t##j : t##i; \\
                const int c = swap ? c##j : c##i; \\
                t##j = swap ? t##i : t##j; \\
                c##j = swap ? c##i : c##j; \\
                t##i = t; \\
                c##i = c; \\
            }}
            SHOAL_SORT(0, 1)
            SHOAL_SORT(2, 3)
            SHOAL_SORT(0, 2)
            SHOAL_SORT(1, 3)
            SHOAL_SORT(1, 2)
            stack[count] = {{c3, t3}};
            count += t3 < NEVER;
            stack[count] = {{c2, t2}};
            count += t2 < NEVER;
            stack[count] = {{c1, t1}};
            count += t1 < NEVER;
            at = c0;
            if (!(t0 < NEVER)) {{
                SHOAL_NEXT
            }}
        }}
        if (at == DONE) break;
        const int code = -1 - at;
        const int first = code >> {LEAF_BITS};
        const int last = first + (code & 7);
        for (int k = first; k < last; ++k) {{
            const int base = triangles + k * {TRIANGLE_WORDS};
            const auto h = SHOAL_READ(base + 2);
            const float t = -(h.x * ox + h.y * oy + h.z * oz + h.w) / (h.x * dx + h.y * dy + h.z * dz);
            // At equal distances the first triangle wins; behind a hole, the next one.
            const bool after = t > beyond || (t == beyond && k > last_hole);
            if (after && (t < best || (t == best && 2 * k < nearest))) {{
                const float px = ox + t * dx, py = oy + t * dy, pz = oz + t * dz;
                const auto a = SHOAL_READ(base), b = SHOAL_READ(base + 1);
                const float u = a.x * px + a.y * py + a.z * pz + a.w;
                const float v = b.x * px + b.y * py + b.z * pz + b.w;
                if (u >= -{EDGE}f && v >= -{EDGE}f && u + v <= 1.0f + {EDGE}f) {{
                    best = t; best_u = u; best_v = v;
                    nearest = 2 * k + ((code >> 3) & 1);
                }}
            }}
        }}
        SHOAL_NEXT
    }}
    return wp::vec4(best, best_u, best_v, wp::cast<float>(nearest));
    #undef SHOAL_READ
    #undef SHOAL_NEXT
    #undef SHOAL_BOX
    #undef SHOAL_SORT
"""


@wp.func_native(TRAVERSAL)
def traverse(
    words: Words,
    nodes: int,
    triangles: int,
    origin: wp.vec3,
    direction: wp.vec3,
    beyond: float,
    last_hole: int,
    far: float,
) -> wp.vec4:
    """Nearest triangle between `beyond` and `far`: distance, u, v and, as bits, 2 x triangle + holes (-1: none).

    At distance `beyond` itself, only triangles after `last_hole` count.
    """
    ...


@wp.func_native("""
#if defined(__CUDA_ARCH__)
    const float4 word = __ldg(reinterpret_cast<const float4*>(words.data) + index);
    return wp::vec4(word.x, word.y, word.z, word.w);
#else
    return words.data[index];
#endif
""")
def word(words: Words, index: int) -> wp.vec4:
    """Four numbers in one read; Warp's indexing would issue four reads."""
    ...


@wp.struct
class Hit:
    """Nearest hit of a ray so far: distance in lengths of the direction, triangle (-1: none), coordinates on it."""

    distance: float
    triangle: int
    u: float
    v: float


@wp.func
@no_type_check
def bits(number: float) -> int:
    """The bits of a float as an integer."""
    return wp.cast(number, int)


@wp.func
@no_type_check
def holds_scene(table: Table, row: int) -> bool:
    """Whether there is a scene in this row; other rows must not be read."""
    there = bool(False)
    if row >= 0 and row < table.shape[0]:
        there = table[row, NODES] >= 0
    return there


@wp.func
@no_type_check
def trace(words: Words, table: Table, row: int, origin: wp.vec3, direction: wp.vec3, hit: Hit) -> Hit:
    """Nearest hit of scene `row` before `hit.distance`, not counting holes, or `hit` unchanged."""
    found = hit
    beyond = float(1.0e-4)
    searching = holds_scene(table, row)
    last_hole = int(2147483647)
    start = origin
    if searching:
        start = origin - wp.vec3(
            wp.cast(table[row, CENTER], float),
            wp.cast(table[row, CENTER + 1], float),
            wp.cast(table[row, CENTER + 2], float),
        )
    while searching:
        nodes = table[row, NODES]
        nearest = traverse(words, nodes, table[row, TRIANGLES], start, direction, beyond, last_hole, hit.distance)
        code = bits(nearest[3])
        searching = False
        if code >= 0:
            triangle = code >> 1
            # At a hole, continue the search behind it.
            if (code & 1) == 1:
                searching = not is_solid(words, table, row, triangle, nearest[1], nearest[2])
                beyond = nearest[0]
                last_hole = triangle
            if not searching:
                found.distance = nearest[0]
                found.triangle = triangle
                found.u = nearest[1]
                found.v = nearest[2]
    return found


@wp.func
@no_type_check
def face_normal(words: Words, table: Table, row: int, triangle: int) -> wp.vec3:
    """Unit normal of a triangle, to either side."""
    height = word(words, table[row, TRIANGLES] + triangle * _TRIANGLE + 2)
    return wp.vec3(height[0], height[1], height[2])


@wp.func
@no_type_check
def unpack(packed: float) -> wp.vec4:
    """Red, green, blue and alpha, 0 to 1, from the four bytes of a number."""
    n = wp.cast(packed, wp.uint32)
    return wp.vec4(
        float(n & wp.uint32(255)),
        float((n >> wp.uint32(8)) & wp.uint32(255)),
        float((n >> wp.uint32(16)) & wp.uint32(255)),
        float(n >> wp.uint32(24)),
    ) * (1.0 / 255.0)


@wp.func
@no_type_check
def texel(words: Words, first: int, index: int) -> wp.vec4:
    """One pixel of a texture."""
    return unpack(words[first + (index >> 2)][index & 3])


@wp.func
@no_type_check
def wrap(i: int, size: int) -> int:
    """Index modulo size, for negative indices too."""
    j = i % size
    return wp.where(j < 0, j + size, j)


@wp.func
@no_type_check
def sample_texture(words: Words, texels: int, picture: wp.vec4, u: float, v: float, level: float) -> wp.vec4:
    """Texture color at (u, v), v up: repeated, bilinear, at the mipmap level nearest to `level`."""
    index = bits(picture[0])
    width = bits(picture[1]) & 65535
    height = bits(picture[1]) >> 16
    last = bits(picture[2]) - 1
    deep = wp.clamp(int(wp.floor(level + 0.5)), 0, last)
    for _ in range(deep):
        index += width * height
        width = wp.max(width >> 1, 1)
        height = wp.max(height >> 1, 1)
    x = (u - wp.floor(u)) * float(width) - 0.5
    y = (1.0 - (v - wp.floor(v))) * float(height) - 0.5
    left = wp.floor(x)
    top = wp.floor(y)
    x0 = wrap(int(left), width)
    y0 = wrap(int(top), height)
    x1 = wrap(int(left) + 1, width)
    y1 = wrap(int(top) + 1, height)
    a = x - left
    b = y - top
    upper = index + y0 * width
    lower = index + y1 * width
    above = texel(words, texels, upper + x0) * (1.0 - a) + texel(words, texels, upper + x1) * a
    below = texel(words, texels, lower + x0) * (1.0 - a) + texel(words, texels, lower + x1) * a
    return above * (1.0 - b) + below * b


@wp.func
@no_type_check
def texture_coordinates(one: wp.vec4, two: wp.vec4, u: float, v: float) -> wp.vec2:
    """Texture coordinates of a point on a triangle, from the first two words of its attributes."""
    w = 1.0 - u - v
    return wp.vec2(one[0] * w + one[2] * u + two[0] * v, one[1] * w + one[3] * u + two[1] * v)


@wp.func
@no_type_check
def surface_color(words: Words, table: Table, row: int, triangle: int, u: float, v: float, fineness: float) -> wp.vec4:
    """Color and alpha of a point on a triangle. `fineness` is log2 of the pixel's size there, in meters."""
    attributes = table[row, ATTRIBUTES] + triangle * _ATTRIBUTE
    one = word(words, attributes)
    two = word(words, attributes + 1)
    three = word(words, attributes + 2)
    material = table[row, MATERIALS] + (bits(two[3]) & 65535) * _MATERIAL
    color = word(words, material)
    picture = word(words, material + 1)
    tint = unpack(three[0]) * (1.0 - u - v) + unpack(three[1]) * u + unpack(three[2]) * v
    color = wp.cw_mul(color, tint)
    if bits(picture[0]) >= 0:
        uv = texture_coordinates(one, two, u, v)
        seen = sample_texture(words, table[row, TEXELS], picture, uv[0], uv[1], two[2] + fineness)
        color = wp.cw_mul(color, seen)
    return color


@wp.func
@no_type_check
def is_solid(words: Words, table: Table, row: int, triangle: int, u: float, v: float) -> bool:
    """Whether the material of the triangle is not cut out at this point, by the finest level of its texture."""
    attributes = table[row, ATTRIBUTES] + triangle * _ATTRIBUTE
    material = table[row, MATERIALS] + (bits(words[attributes + 1][3]) & 65535) * _MATERIAL
    cutoff = words[material + 1][3]
    solid = bool(True)
    if cutoff > 0.0:
        solid = surface_color(words, table, row, triangle, u, v, -100.0)[3] >= cutoff
    return solid
