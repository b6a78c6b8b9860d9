// A consumer warpgroup: S = Q K^T, softmax and O += P V for its 64 query rows of every tile of the CTA.
//
// This header declares what the warpgroup holds and the steps it takes. Its loop (main_loop.h) calls them in this
// order:
//   products.h  begins a tile; S = Q K^T of a KV block; of a pair of CTAs the other one's part of S
//   softmax.h   from S to logits: scales, soft cap, ALiBi, masks; the reference m of the softmax, P = 2^(logits - m),
//               row sums
//   products.h  O += P V; hands the finished rows to store.h
#pragma once

#include "common/ptx/shared_address.h"
#include "common/softmax.h"
#include "fa3/params.h"
#include "fa3/shared_memory.h"
#include "fa3/wgmma.h"

namespace cutlass_kernels::fa3 {

template <class Element, class Tile, Logits kLogits>
struct Consumer {
  using Layout = Shared<Tile>;
  using Operand = typename Element::Operand;
  static constexpr int kN = Tile::kBlockN;
  static constexpr int kDqk = Tile::kHeadDimQk;
  static constexpr int kDvo = Tile::kHeadDimVo;
  static constexpr bool kFp8 = Element::kBytes == 1;
  // The K of one wgmma: columns of Q and K, keys of P and V.
  static constexpr int kStep = 32 / Element::kBytes;
  static constexpr int kPRegisters = kN * Element::kBytes / 8;

  // What a thread holds of the warpgroup's fragments of 64 rows: two rows, 8 apart (wgmma.h).
  using ScoreFragment = float[kN / 2];                     // S (2, BLK_N / 4)
  using ProbabilityFragment = std::uint32_t[kPRegisters];  // P (2, BLK_N / 4), packed
  using OutputFragment = float[kDvo / 2];                  // O (2, D_VO / 4)
  using RowFactors = float[2];                             // (2)

  // Under a causal mask the first warpgroup of a tile may see no key of the tile's last KV block.
  static constexpr bool kSkips = !Tile::kPacked && Tile::kBlockM - kWarpgroupRows >= kN;

  // Whether KV blocks of negligible weight are skipped (skip_softmax_factor). This takes the maximum of every block,
  // and the true maximum of a row as its m, to tell their weight.
  static constexpr bool kSkipsNegligible = kLogits == Logits::kSkipping;
  static_assert(!kSkipsNegligible || (!kFp8 && !Tile::kPacked));

  // Lazy maximum: the maximum of a KV block is taken in a tile's first block, where an interval mask hides keys (but in
  // the general variant), and for softmax statistics. Elsewhere P = 2^(x - m) uses the m there is. If a thread's part
  // of a row then sums to kSumLimit or more, the block is done again with its own maximum: P must fit its type (fp16),
  // and O must stay far from 2^127 where V is large. A block without a larger x needs no m of its own: P, sums and O
  // are floating-point numbers relative to 2^m, whatever m is. P of e4m3, which ends at 448, is looked at itself.
  static constexpr bool kLazyMax = Tile::kLazyMax && !kSkipsNegligible;
  static constexpr float kSumLimit = std::is_same_v<Element, fp16> ? 0x1p15f : 0x1p30f;
  // log2 of the P that belongs to the maximum. P of e4m3 has 3 mantissa bits down to 2^-6 and none below 2^-9. With 2^4
  // as its largest value it keeps them for 2^10 below the maximum, and may still grow before another one is taken. P
  // has to stay below 248, which rounds to 256.
  static constexpr int kLift = kFp8 ? 4 : 0;
  static constexpr float kHeadroom = kFp8 ? 7.0f : OnlineSoftmax<2>::kHeadroom;  // below log2(248)

  // The logits_scale of a head, which only the device knows, is folded into the scale of the softmax.
  static constexpr bool kFoldsScale = kFp8 && kLogits == Logits::kTransformed;
  static constexpr bool kIsGeneral = kLogits == Logits::kGeneral;
  static constexpr bool kHasStats = kIsGeneral && !kFp8;

  // Four lanes (a quad) share a row. Of a custom mask, lane l of a quad reads the bits of 32 keys, from key
  // 32 (l % kQuadWords) of the KV block on, for the whole quad.
  static constexpr int kQuadWords = kN / 32;
  static_assert(kLogits != Logits::kGeneral || kQuadWords <= 4);

  const KernelParams& params;
  Layout& shared;
  const int warpgroup;  // index among the consumers
  const int lane;
  const std::uint32_t q_base, k_base, v_base;  // shared-memory addresses of the first buffers

  // The tile: its job, and the Q buffer of the warpgroup, which uses every kConsumers-th.
  Ring<kJobBuffers> jobs;
  int q_buffer;
  // Q (2, D_QK / 4)
  std::uint32_t q_fragments[Tile::kQInRegisters ? kDqk * Element::kBytes / 8 : 1];
  std::uint32_t q_phase = 0;
  int block_begin;  // first key of the KV block whose S is being computed
  int key_begin;    // first key of the tile
  // First row of the thread, in its request; of a packed tile, first token of the warpgroup.
  int row;
  int unmasked_begin;  // every row of the warpgroup sees the keys [unmasked_begin, unmasked_end)
  int unmasked_end;
  bool skips_block;  // no row of the warpgroup sees a key of the tile's last KV block
  bool has_rows;     // of a packed tile
  int qo_len;
  int kv_len;
  LogitsTransform head_transform;  // if kFoldsScale
  float log2_threshold;            // if kSkipsNegligible: weights below it are negligible
  // Of a custom mask: the two words that contain the lane's 32 bits, of each row. Read a KV block ahead (read_bits()).
  std::uint32_t low_bits[2], high_bits[2];  // (2)

  Ring<Tile::kKStages> k_ring;
  Ring<Tile::kVStages> v_ring;
  std::uint32_t exchange_phase = 0;  // of a pair of CTAs
  OnlineSoftmax<2> softmax;          // of the two rows
  float weight_sum[2];               // of e4m3: (row) of the rounded P, which O is divided by

  CUTE_DEVICE Consumer(const KernelParams& params_, Layout& shared_, int warpgroup_)
      : params(params_),
        shared(shared_),
        warpgroup(warpgroup_),
        lane(threadIdx.x % 32),
        q_base(shared_address(shared_.q)),
        k_base(shared_address(shared_.k)),
        v_base(shared_address(shared_.v)),
        q_buffer(warpgroup_),
        softmax(params_.transform.scale) {}

  // main_loop.h
  CUTE_DEVICE void run();
  CUTE_DEVICE bool compute_tiles();
  CUTE_DEVICE void drain_tile();
  CUTE_DEVICE bool compute_fp8_tiles();
  CUTE_DEVICE void raise_sums(RowFactors& row_max, OutputFragment& o);
  CUTE_DEVICE bool compute_probabilities(ScoreFragment& s, ProbabilityFragment& p, OutputFragment& o, RowFactors& sum,
                                         bool first);
  CUTE_DEVICE void add_output(ScoreFragment& s, ProbabilityFragment& p, OutputFragment& o, RowFactors& sum, bool lazy,
                              bool first);
  // Whether P is added up before it is rounded too, for an LSE or partial results. In packed tiles always: leaving it
  // out is no faster there.
  CUTE_DEVICE bool needs_sums() const { return Tile::kPacked || params.attention.lse != nullptr; }
  CUTE_DEVICE bool compute_logits(ScoreFragment& s);

  // products.h
  CUTE_DEVICE bool begin_tile();
  CUTE_DEVICE float softmax_scale() const;
  CUTE_DEVICE void read_q(std::uint32_t (&a)[4], int step) const;
  CUTE_DEVICE void advance_q();
  CUTE_DEVICE void issue_scores(ScoreFragment& s);
  CUTE_DEVICE void end_scores(bool first);
  CUTE_DEVICE void skip_keys();

  // softmax.h
  CUTE_DEVICE void transform(ScoreFragment& s) const;
  CUTE_DEVICE bool needs_mask() const { return needs_mask(block_begin); }
  CUTE_DEVICE bool needs_mask(int begin) const;
  CUTE_DEVICE void read_bits(int ahead);
  CUTE_DEVICE void apply_mask(ScoreFragment& s) const;
  CUTE_DEVICE bool has_bits() const;
  CUTE_DEVICE std::int64_t first_bit(int r) const;
  CUTE_DEVICE void apply_bits(ScoreFragment& s) const;
  CUTE_DEVICE bool is_exact() const;
  CUTE_DEVICE float headroom() const;
  CUTE_DEVICE static void find_maximum(const ScoreFragment& s, RowFactors& row_max);
  CUTE_DEVICE bool are_negligible(const RowFactors& row_max) const;
  CUTE_DEVICE bool raise_to(RowFactors& row_max, RowFactors& factor);
  CUTE_DEVICE bool raise_maximum(const ScoreFragment& s, RowFactors& factor);
  template <bool kSums = true>
  CUTE_DEVICE void take_exponentials(const ScoreFragment& s, ProbabilityFragment& p, RowFactors& sum) const;
  CUTE_DEVICE static bool fits(const RowFactors& sum, int r);
  CUTE_DEVICE static bool fits(const ProbabilityFragment& p, int r);

  // products.h
  CUTE_DEVICE void return_receive_buffer() const;
  CUTE_DEVICE void add_peer_scores(ScoreFragment& s);
  CUTE_DEVICE void issue_output(OutputFragment& o, ProbabilityFragment& p, bool accumulate);
  template <int kPart>  // (2, columns / 4)
  using Product = float[(kDvo / Tile::kOutputParts + (kPart + 1 == Tile::kOutputParts ? Layout::kRowsOfOnes : 0)) / 2];
  template <int kPart>
  CUTE_DEVICE void issue_part(Product<kPart>& product, ProbabilityFragment& p);
  CUTE_DEVICE void begin_output(Product<0>& product, ProbabilityFragment& p);
  template <int kPart>
  CUTE_DEVICE void add_part(OutputFragment& o, Product<kPart>& product, ProbabilityFragment& p);
  CUTE_DEVICE void skip_values();
  CUTE_DEVICE static void rescale(OutputFragment& o, const RowFactors& factor);
  CUTE_DEVICE void store(OutputFragment& o, const OnlineSoftmax<2>& of_tile, int job_buffer);

  // The thread's row r of the warpgroup's 64; its token in the request; its head in the pack of a packed tile.
  CUTE_DEVICE static int warpgroup_row(int r) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + r * 8; }
  CUTE_DEVICE int token(int r) const {
    if constexpr (!Tile::kPacked) return row + r * 8;
    return row + int(params.packed.heads.divide(warpgroup_row(r)));
  }
  CUTE_DEVICE int pack_head(int r) const {
    if constexpr (!Tile::kPacked) return 0;
    return params.packed.heads.modulo(warpgroup_row(r));
  }

  // Moves the branch out of the loop's instructions, which are fetched ahead.
  static CUTE_DEVICE bool unlikely(bool condition) { return __builtin_expect(condition, false); }

  // Returns a buffer to its producer. One arrival per warp.
  CUTE_DEVICE void release(Barrier& empty) const {
    if (lane == 0) empty.arrive();
  }

  // Ping-pong: the warpgroups take turns in issuing their products, so that one takes exponentials while the products
  // of another keep the tensor cores busy.
  CUTE_DEVICE void wait_turn() const {
    if constexpr (Tile::kPingPong && Tile::kConsumers > 1) {
      asm volatile("bar.sync %0, 256;" ::"r"(int(kBarrierTurn) + warpgroup) : "memory");
    }
  }
  CUTE_DEVICE void end_turn() const {
    if constexpr (Tile::kPingPong && Tile::kConsumers > 1) {
      const int next = warpgroup + 1 == Tile::kConsumers ? 0 : warpgroup + 1;
      asm volatile("bar.arrive %0, 256;" ::"r"(int(kBarrierTurn) + next) : "memory");
    }
  }

  // Whether a condition holds in all threads of the warpgroup, which take part together.
  CUTE_DEVICE bool all_agree(bool condition) const {
    static_assert(kBarrierTurn + Tile::kConsumers <= kBarrierVote);
    std::uint32_t agreed;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %2, 0;\nbar.red.and.pred q, %1, 128, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(agreed)
        : "r"(int(kBarrierVote) + warpgroup), "r"(std::uint32_t(condition))
        : "memory");
    return __any_sync(0xffffffffu, agreed != 0);  // known to be the same in all: a uniform branch
  }
};

}  // namespace cutlass_kernels::fa3
