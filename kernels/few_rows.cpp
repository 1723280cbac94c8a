// Products of few rows with a matrix that lies in memory as it is: out[m, n] = sum over k of x[m, k] * weight[n, k].
//
// Reading the matrix is what takes time, so it is read once for all rows, and each cache line is asked for two blocks
// ahead. The sum of a number of ``out`` takes the same additions in the same order, whatever the number of rows and
// threads: 16 sums side by side over k, then these, then what k leaves over. Built by few_rows.py.

using Lanes = float __attribute__((vector_size(64), aligned(4)));
using Half = float __attribute__((vector_size(32), aligned(4)));
using Quarter = float __attribute__((vector_size(16), aligned(4)));

#define INLINE __attribute__((always_inline)) static inline

INLINE float total(Lanes lanes) {
    const Half low = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7);
    const Half half = low + __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15);
    const Quarter left = __builtin_shufflevector(half, half, 0, 1, 2, 3);
    const Quarter sum = left + __builtin_shufflevector(half, half, 4, 5, 6, 7);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// M rows of x with R rows of the matrix. M * R sums have to fit the 32 registers, beside R of the matrix.
template <int M, int R>
INLINE void block(const float* x, const float* weight, const float* bias, long K, float* out, long N) {
    Lanes sums[M][R] = {};
    const float* ahead = weight + 2 * R * K;  // asking for what lies behind the matrix does nothing
    long k = 0;
    for (; k + 16 <= K; k += 16) {
        Lanes row[R];
        for (int r = 0; r < R; r++) {
            row[r] = *reinterpret_cast<const Lanes*>(weight + r * K + k);
            __builtin_prefetch(ahead + k * R + 16 * r, 0, 2);  // into the L2 cache: 1.3 times as fast as into the L1
        }
        for (int m = 0; m < M; m++) {
            const Lanes one = *reinterpret_cast<const Lanes*>(x + m * K + k);
            for (int r = 0; r < R; r++) sums[m][r] += one * row[r];
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) {
            float sum = total(sums[m][r]);
            for (long rest = k; rest < K; rest++) sum = __builtin_fmaf(x[m * K + rest], weight[r * K + rest], sum);
            out[m * N + r] = bias ? sum + bias[r] : sum;
        }
}

template <int M, int R>
void rows(const float* x, const float* weight, const float* bias, long from, long to, long N, long K, float* out) {
    long n = from;
    for (; n + R <= to; n += R) block<M, R>(x, weight + n * K, bias ? bias + n : bias, K, out + n, N);
    for (; n < to; n++) block<M, 1>(x, weight + n * K, bias ? bias + n : bias, K, out + n, N);
}

using Rows = void (*)(const float*, const float*, const float*, long, long, long, long, float*);
static const Rows BY_ROWS[] = {rows<1, 4>, rows<2, 4>, rows<3, 4>, rows<4, 4>,
                               rows<5, 4>, rows<6, 3>, rows<7, 3>, rows<8, 2>};

// x [M, K], weight [N, K], bias [N] or null, out [M, N]; M from 1 to 8, everything contiguous.
extern "C" void few_rows(
    const float* x, long M, const float* weight, const float* bias, long N, long K, float* out, long threads) {
    const Rows one = BY_ROWS[M - 1];
    if (threads <= 1) return one(x, weight, bias, 0, N, N, K, out);
    const long share = (N + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long i = 0; i < threads; i++) {
        const long from = i * share, to = from + share < N ? from + share : N;
        if (from < to) one(x, weight, bias, from, to, N, K, out);
    }
}
