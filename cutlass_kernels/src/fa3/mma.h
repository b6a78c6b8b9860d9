// The consumer warpgroups: S = Q K^T, softmax, O += P V.
#pragma once

#include "common/bit_mask.h"
#include "common/ldmatrix.h"
#include "common/softmax.h"
#include "fa3/params.h"
#include "fa3/shared.h"
#include "fa3/store.h"
#include "fa3/store_packed.h"
#include "fa3/wgmma.h"

namespace cutlass_kernels::fa3 {

// One stream of (tile, block of keys) without a seam: while the last P V of a tile runs, the first S of the next one is
// computed and its exponentials taken.
//
//  tensor   | S(j+1) = Q K(j+1)^T | O += P(j) V(j)     | S(j+2) ...
//  others   |                     | mask, max, exp of S(j+1) | P(j+1) = pack(S(j+1)), rescale or store O
template <class Element, class Tile, Logits kLogits>
struct Consumer {
  using Layout = Shared<Tile>;
  static constexpr int kN = Tile::kBlockN;
  static constexpr int kDqk = Tile::kHeadDimQk;
  static constexpr int kDvo = Tile::kHeadDimVo;
  using Operand = typename Element::Operand;
  static constexpr bool kFp8 = Element::kBytes == 1;
  static constexpr int kStep = 32 / Element::kBytes;  // columns, or keys, that a product takes
  static constexpr int kPRegisters = kN * Element::kBytes / 8;
  // Under a causal mask the first warpgroup may see no key of the block on which the tile ends.
  static constexpr bool kSkips = !Tile::kPacked && Tile::kBlockM - kWarpgroupRows >= kN;

  // The maximum of a block is looked for only where it must be: in a tile's first block and where a mask hides keys.
  // Elsewhere 2^(x - m) is taken with the m there is, and if a thread's part of a row then adds up to more than this, the
  // block is done again with its maximum: P must fit its type (fp16), and O must stay far from 2^127 where V is large. That no
  // larger x appears costs nothing: P, sums and O are floating-point numbers relative to 2^m, whatever m is.
  // P of e4m3 ends at 448: sums below 256 hold no larger number, else P itself is looked at.
  static constexpr float kSumLimit = kFp8                            ? 0x1p8f
                                     : std::is_same_v<Element, fp16> ? 0x1p15f
                                                                     : 0x1p30f;
  // log2 of P where S is the maximum that was last taken. P of e4m3 has 3 bits from 2^-6 on, 2^10 below that maximum, and
  // it may grow 2^4-fold before another maximum must be taken.
  static constexpr int kLift = kFp8 ? 4 : 0;
  // Whether blocks of negligible weight are skipped, which takes the maximum of every block, and, to tell their weight, the
  // rows' maxima as m.
  static constexpr bool kSkipsNegligible = kLogits == Logits::kSkipping;
  static constexpr bool kLazyMax = Tile::kLazyMax && !kSkipsNegligible;
  static_assert(!kSkipsNegligible || (!kFp8 && !Tile::kPacked));
  // The factor of a head that only the device knows becomes part of the softmax's.
  static constexpr bool kFoldsScale = kFp8 && kLogits == Logits::kTransformed;
  static constexpr bool kHasStats = kLogits == Logits::kGeneral && !kFp8;

  const KernelParams& params;
  Layout& shared;
  const int warpgroup;
  const int lane;
  const std::uint32_t q_base, k_base, v_base;  // shared-memory addresses

  // Tile.
  Ring<kJobSlots> jobs;
  int q_buffer;
  std::uint32_t q_fragments[Tile::kQInRegisters ? kDqk * Element::kBytes / 8 : 1];
  std::uint32_t q_phase = 0;
  int key;        // first one of the block that S is being computed of
  int key_begin;  // first one of the tile
  int row;  // of the thread's first row, in its request; of a packed tile: of the warpgroup's first row
  int all_begin;  // keys that every row of the warpgroup sees
  int all_end;
  bool skip;      // no row of the warpgroup sees a key of the tile's last block
  bool has_rows;  // of a packed tile
  int qo_len;
  int kv_len;
  LogitsTransform of_head;  // where it folds scales
  float log2_threshold;     // weights below it are negligible
  // Of a custom mask, for the block that S is being computed of: of each of the thread's rows, the two words in which the 32
  // keys lie that this lane of the quad looks after.
  std::uint32_t low_bits[2], high_bits[2];

  Ring<Tile::kKStages> k_ring;
  Ring<Tile::kVStages> v_ring;
  OnlineSoftmax<2> softmax;

  CUTE_DEVICE Consumer(const KernelParams& params_, Layout& shared_, int warpgroup_)
      : params(params_),
        shared(shared_),
        warpgroup(warpgroup_),
        lane(threadIdx.x % 32),
        q_base(cute::cast_smem_ptr_to_uint(shared_.q)),
        k_base(cute::cast_smem_ptr_to_uint(shared_.k)),
        v_base(cute::cast_smem_ptr_to_uint(shared_.v)),
        q_buffer(warpgroup_),
        softmax(params_.transform.scale) {}

  // Moves the branch out of the loop's instructions, which are fetched ahead.
  static CUTE_DEVICE bool unlikely(bool condition) { return __builtin_expect(condition, false); }

  CUTE_DEVICE void release(Barrier& empty) const {
    if (lane == 0) empty.arrive();
  }

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

  // The A fragment of kStep columns of the warp's rows.
  CUTE_DEVICE void read_q(std::uint32_t (&a)[4], int step) const {
    const int q_row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const int chunk = step % 4 * 2 + lane / 16;
    ldmatrix_x4(a, q_base + q_buffer * Layout::kQBytes + step / 4 * Layout::kPanelBytesQ +
                       q_row * 128 + ((chunk ^ (q_row & 7)) << 4));
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

  // Waits for the description and the Q of the tile at `jobs` and q_buffer. False if there is none.
  CUTE_DEVICE bool begin_tile() {
    shared.job_full[jobs.index].wait(jobs.phase);
    const Job job = shared.jobs[jobs.index];
    if (job.valid == 0) return false;
    shared.q_full[q_buffer].wait(q_phase);
    if constexpr (Tile::kQInRegisters) {
      CUTE_UNROLL
      for (int i = 0; i < kDqk / kStep; ++i) {
        read_q(reinterpret_cast<std::uint32_t (&)[4]>(q_fragments[4 * i]), i);
      }
    }
    const IntervalMask mask = make_mask(params, job.qo_len, job.kv_len);
    key_begin = job.key_begin;
    key = key_begin + (job.blocks - 1) * kN;
    int first_row, last_row;
    if constexpr (Tile::kPacked) {
      first_row = job.row_begin + warpgroup * params.packed.tokens;
      last_row = first_row + params.packed.last_token;
      row = first_row;
      has_rows = first_row < min(job.qo_len, job.row_begin + params.attention.schedule.tile_rows);
    } else {
      first_row = job.row_begin + warpgroup * kWarpgroupRows;
      last_row = first_row + kWarpgroupRows - 1;
      row = first_row + warpgroup_row(0);
    }
    all_begin = mask.lo(last_row);
    all_end = mask.hi(first_row);
    if constexpr (kLogits == Logits::kGeneral) {
      all_begin = max(all_begin, job.all_begin);
      all_end = min(all_end, job.all_end);
    }
    skip = kSkips && key > key_begin && key >= mask.hi(last_row);
    qo_len = job.qo_len;
    kv_len = job.kv_len;
    if constexpr (kFoldsScale) {
      const AttentionParams& p = params.attention;
      of_head =
          LogitsTransform::make(p.sm_scale * scale_of(p.logits_scale, job.head), p.logits_soft_cap);
    }
    if constexpr (kSkipsNegligible) {
      // At most 1: where keys are few, the factor must not hide what would be a new maximum.
      log2_threshold =
          fminf(__log2f(__fdividef(params.attention.skip_softmax_factor, float(job.kv_len))), 0.0f);
    }
    return true;
  }
  // Log2 units per unit of S, of the tile that has begun.
  CUTE_DEVICE float softmax_scale() const {
    return kFoldsScale ? of_head.scale : params.transform.scale;
  }
  CUTE_DEVICE void advance_q() {
    q_buffer += Tile::kConsumers;
    while (q_buffer >= Tile::kQBuffers) {
      q_buffer -= Tile::kQBuffers;
      q_phase ^= 1;
    }
  }

  CUTE_DEVICE void issue_scores(float (&s)[kN / 2]) {
    const auto q = descriptor_k_major(q_base + q_buffer * Layout::kQBytes);
    const auto k = descriptor_k_major(k_base + k_ring.index * Layout::kKBytes);
    wgmma_fence();
    CUTE_UNROLL
    for (int i = 0; i < kDqk / kStep; ++i) {
      const std::uint64_t k_step = k + (i / 4 * Layout::kPanelBytesKv + i % 4 * 32) / 16;
      if constexpr (Tile::kQInRegisters) {
        Wgmma<Operand, kN>::template rs<BOrder::kKMajor>(s, &q_fragments[4 * i], k_step, i > 0);
      } else {
        Wgmma<Operand, kN>::ss(s, q + (i / 4 * Layout::kPanelBytesQ + i % 4 * 32) / 16, k_step,
                               i > 0);
      }
    }
    wgmma_commit();
  }

  CUTE_DEVICE void issue_output(float (&o)[kDvo / 2], std::uint32_t (&p)[kPRegisters],
                                bool accumulate) {
    const std::uint32_t v_stage = v_base + v_ring.index * Layout::kVBytes;
    const auto v =
        kFp8 ? descriptor_k_major(v_stage) : descriptor_mn_major(v_stage, Layout::kPanelBytesKv);
    wgmma_fence();
    CUTE_UNROLL
    for (int i = 0; i < kN / kStep; ++i) {
      if constexpr (kFp8) {
        const std::uint64_t v_step = v + (i / 4 * Layout::kPanelBytesVt + i % 4 * 32) / 16;
        Wgmma<Operand, kDvo>::template rs<BOrder::kKMajor>(o, &p[4 * i], v_step,
                                                           i > 0 || accumulate);
      } else {
        Wgmma<Operand, kDvo>::template rs<BOrder::kMnMajor>(o, &p[4 * i], v + i * (16 * 128 / 16),
                                                            i > 0 || accumulate);
      }
    }
    wgmma_commit();
  }

  // The thread's row r of the warpgroup's 64, its token of the request, and its head of the pack.
  CUTE_DEVICE static int warpgroup_row(int r) {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + r * 8;
  }
  CUTE_DEVICE int token(int r) const {
    if constexpr (!Tile::kPacked) return row + r * 8;
    return row + int(params.packed.heads.divide(warpgroup_row(r)));
  }
  CUTE_DEVICE int pack_head(int r) const {
    if constexpr (!Tile::kPacked) return 0;
    return params.packed.heads.modulo(warpgroup_row(r));
  }

  CUTE_DEVICE bool has_bits() const {
    return kLogits == Logits::kGeneral && params.attention.mask.words != nullptr;
  }

  CUTE_DEVICE void transform(float (&s)[kN / 2]) const {
    if constexpr (kFoldsScale) {
      if (of_head.changes_logits()) of_head.apply(s, kN / 2);
    } else if constexpr (kLogits == Logits::kTransformed) {
      params.transform.apply(s, kN / 2);
    }
    if constexpr (kLogits == Logits::kGeneral) {
      if (!params.changes_logits) return;
      const Alibi& alibi = params.attention.alibi;
      float factor[2], slope[2];
      int distance[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int head = shared.jobs[jobs.index].head + pack_head(r);
        factor[r] = scale_of(params.attention.logits_scale, head);
        slope[r] = alibi.slopes == nullptr ? 0.0f : __ldg(alibi.slopes + head);
        distance[r] = key + lane % 4 * 2 - (alibi.relative ? token(r) : 0);
      }
      params.general.apply(s, factor, slope, distance);
    }
  }

  // Whether some row of the warpgroup may not see all keys of the block.
  CUTE_DEVICE bool needs_mask() const { return key < all_begin || key + kN > all_end; }

  // Lane l of a quad looks after the keys from 32 (l % kQuadWords) on of the block, for all of it.
  static constexpr int kQuadWords = kN / 32;
  static_assert(kLogits != Logits::kGeneral || kQuadWords == 4 || kQuadWords == 2);
  CUTE_DEVICE std::int64_t first_bit(int r) const {
    return std::int64_t(shared.jobs[jobs.index].mask_begin) * 8 + std::int64_t(token(r)) * kv_len +
           key + lane % kQuadWords * 32;
  }
  // Reads the bits of the block at `key`, while its S is being computed.
  CUTE_DEVICE void read_bits() {
    if constexpr (kLogits == Logits::kGeneral) {
      if (!has_bits() || !needs_mask()) return;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const std::int64_t word = first_bit(r) >> 5;
        low_bits[r] = word_at(params.attention.mask, word);
        high_bits[r] = word_at(params.attention.mask, word + 1);
      }
    }
  }
  CUTE_DEVICE void apply_bits(float (&s)[kN / 2]) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t own =
          __funnelshift_r(low_bits[r], high_bits[r], std::uint32_t(first_bit(r)));
      CUTE_UNROLL
      for (int w = 0; w < kQuadWords; ++w) {
        const std::uint32_t bits = __shfl_sync(0xffffffffu, own, (lane & ~3) | w) >> (lane % 4 * 2);
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          mask_unless_bit(s[16 * w + 4 * i + 2 * r], bits, 8 * i);
          mask_unless_bit(s[16 * w + 4 * i + 2 * r + 1], bits, 8 * i + 1);
        }
      }
    }
  }
  CUTE_DEVICE void apply_mask(float (&s)[kN / 2]) const {
    if (has_bits()) {
      apply_bits(s);
      if (params.attention.window_left < 0 && key + kN <= kv_len) return;
    }
    const IntervalMask mask = make_mask(params, qo_len, kv_len);
    const int key0 = key + lane % 4 * 2;
    const bool below = key < all_begin;  // hides keys at the block's low end, too
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int lo = mask.lo(token(r));
      const int hi = mask.hi(token(r));
      if (below) {
        // Seen if lo <= key < hi: one unsigned comparison of the distance from lo.
        const std::uint32_t from_lo = key0 - lo;
        const std::uint32_t extent = max(hi - lo, 0);
        CUTE_UNROLL
        for (int i = 0; i < kN / 8; ++i) {
          mask_unless_below(s[4 * i + 2 * r], from_lo + i * 8, extent);
          mask_unless_below(s[4 * i + 2 * r + 1], from_lo + i * 8 + 1, extent);
        }
      } else {
        // With a constant on one side of the comparison there is no addition per key.
        const int limit = hi - key0;
        CUTE_UNROLL
        for (int i = 0; i < kN / 8; ++i) {
          mask_unless_above(s[4 * i + 2 * r], limit, i * 8);
          mask_unless_above(s[4 * i + 2 * r + 1], limit, i * 8 + 1);
        }
      }
    }
  }

  // Whether m is to be the maximum, not only close to it.
  CUTE_DEVICE bool is_exact() const { return kHasStats && params.attention.stats != nullptr; }
  CUTE_DEVICE float headroom() const {
    if constexpr (kSkipsNegligible) return 0.0f;
    return kHasStats ? params.stats.headroom : OnlineSoftmax<2>::kHeadroom;
  }

  // The maxima of a thread's part of its rows.
  CUTE_DEVICE static void find_maximum(const float (&s)[kN / 2], float (&row_max)[2]) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      // Four chains, since each step of one waits for the step before.
      float chain[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) chain[i] = s[i / 2 * 4 + 2 * r + i % 2];
      CUTE_UNROLL
      for (int i = 4; i < kN / 4; ++i) {
        chain[i % 4] = fmaxf(chain[i % 4], s[i / 2 * 4 + 2 * r + i % 2]);
      }
      row_max[r] = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
    }
  }
  // Whether weights with these maxima are negligible in all rows of the warpgroup. A thread need not know the maximum of a whole
  // row: where all its parts are, the row's is below. Rows after the request's last have no say.
  CUTE_DEVICE bool are_negligible(const float (&row_max)[2]) const {
    bool below = true;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      below &= token(r) >= qo_len || softmax.is_below(log2_threshold, r, row_max[r]);
    }
    return all_agree(below);
  }
  // Raises m where a row's maximum leaves no headroom. Returns whether O must be multiplied by `factor`.
  CUTE_DEVICE bool raise_to(float (&row_max)[2], float (&factor)[2]) {
    bool raised = false;
    if (__any_sync(0xffffffffu, softmax.exceeds(row_max, headroom()))) {
      OnlineSoftmax<2>::reduce_max(row_max);
      softmax.template raise<kLift>(row_max, [&](int r, float f) { factor[r] = f; }, headroom());
      raised = true;
    }
    return raised;
  }
  CUTE_DEVICE bool raise_maximum(const float (&s)[kN / 2], float (&factor)[2]) {
    float row_max[2];
    find_maximum(s, row_max);
    return raise_to(row_max, factor);
  }

  // P = 2^(scale s - m), packed, and its row sums. S stays as it is. In a unit with eight times the latency of the others,
  // exponentials leave seven of eight issue slots to the sums and packing beside them.
  CUTE_DEVICE void take_exponentials(const float (&s)[kN / 2], std::uint32_t (&p)[kPRegisters],
                                     float (&sum)[2]) const {
    sum[0] = sum[1] = 0.0f;
    CUTE_UNROLL
    for (int i = 0; i < kPRegisters; ++i) {
      const int r = i % 2;
      const int first = kFp8 ? i / 2 * 8 + 2 * r : 2 * i;
      const float p0 = exp2_unordered(fmaf(s[first], softmax.scale, softmax.minus_m[r]));
      const float p1 = exp2_unordered(fmaf(s[first + 1], softmax.scale, softmax.minus_m[r]));
      sum[r] += p0;
      sum[r] += p1;
      if constexpr (kFp8) {  // eight keys on: V lies in that order, see transpose_values.h
        const float p2 = exp2_unordered(fmaf(s[first + 4], softmax.scale, softmax.minus_m[r]));
        const float p3 = exp2_unordered(fmaf(s[first + 5], softmax.scale, softmax.minus_m[r]));
        sum[r] += p2;
        sum[r] += p3;
        p[i] = Operand::pack(p0, p1, p2, p3);
      } else {
        p[i] = Operand::pack(p0, p1);
      }
    }
  }
  // Whether P, of these sums, holds what it should.
  CUTE_DEVICE static bool holds(const float (&sum)[2], const std::uint32_t (&p)[kPRegisters]) {
    const bool small = sum[0] < kSumLimit && sum[1] < kSumLimit;
    if constexpr (!kFp8) return small;
    if (__all_sync(0xffffffffu, small)) return true;
    std::uint32_t carries = 0;  // 8 more than a byte of 256 or more, or of NaN, has the highest bit
    CUTE_UNROLL
    for (int i = 0; i < kPRegisters; ++i) carries |= p[i] + 0x08080808u;
    return (carries & 0x80808080u) == 0;
  }
  CUTE_DEVICE static void rescale(float (&o)[kDvo / 2], const float (&factor)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < kDvo / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  CUTE_DEVICE void store(float (&o)[kDvo / 2], const OnlineSoftmax<2>& of_tile, int slot) {
    if constexpr (Tile::kPacked) {
      store_packed_tile<Element, Tile, kHasStats>(params, shared.jobs[slot], warpgroup, of_tile, o,
                                                  shared.o[warpgroup]);
    } else {
      store_tile<Element, Tile, kLogits>(params, shared.jobs[slot], warpgroup, of_tile, o,
                                         cute::cast_smem_ptr_to_uint(shared.o[warpgroup]));
    }
    // Every lane, having read the job: racecheck does not follow an order through lane 0.
    shared.job_empty[slot].arrive();
  }
  // S of a block is computed: its K may go. So may Q, after a tile's last block, or, where it was copied to registers,
  // after the first: the copy is complete only once a product has used it (an arrival does not wait for the loads before
  // it, and the next Q overwrote what some lanes had yet to read).
  CUTE_DEVICE void end_scores(bool first) {
    release(shared.k_empty[k_ring.index]);
    k_ring.advance();
    if (Tile::kQInRegisters ? first : key == key_begin) release(shared.q_empty[q_buffer]);
  }

  // Lets a block of keys pass. It takes its turn: warpgroups more than a block out of step could wait for each other's
  // stages. Only one block of a tile, and none of the first tile, so that V stages are not held for long.
  CUTE_DEVICE void skip_keys() {
    shared.k_full[k_ring.index].wait(k_ring.phase);
    wait_turn();
    end_turn();
    release(shared.k_empty[k_ring.index]);
    k_ring.advance();
    key -= kN;
  }
  CUTE_DEVICE void skip_values() {
    shared.v_full[v_ring.index].wait(v_ring.phase);
    release(shared.v_empty[v_ring.index]);
    v_ring.advance();
  }

  // Lets the keys of a tile pass that has no rows for this warpgroup.
  CUTE_DEVICE void pass_tile() {
    release(shared.q_empty[q_buffer]);
    for (; key >= key_begin; key -= kN) {
      shared.k_full[k_ring.index].wait(k_ring.phase);
      release(shared.k_empty[k_ring.index]);
      k_ring.advance();
      skip_values();
    }
    shared.job_empty[jobs.index].arrive();
    advance_q();
    jobs.advance();
  }

  CUTE_DEVICE void run() {
    bool found = begin_tile();
    if constexpr (Tile::kPacked) {
      while (true) {
        while (found && !has_rows) {
          pass_tile();
          found = begin_tile();
        }
        if (!found) return;
        found = compute_tiles();
      }
    } else if (found) {
      compute_tiles();
      if (lane == 0) cute::tma_store_wait<0>();  // shared memory lives until its readers are done
    }
  }

  // The tile that has begun and those after it: all, or up to one without rows for this warpgroup, which has then begun;
  // false at the end of all.
  CUTE_DEVICE bool compute_tiles() {
    float s[kN / 2];
    float o[kDvo / 2];
    std::uint32_t p[kPRegisters];
    float factor[2];
    float sum[2];
    bool found = false;
    softmax = OnlineSoftmax<2>(softmax_scale());

    shared.k_full[k_ring.index].wait(k_ring.phase);
    issue_scores(s);
    read_bits();
    wgmma_wait<0>();
    pin(s);
    end_scores(true);
    transform(s);
    if (needs_mask()) apply_mask(s);
    raise_maximum(s, factor);
    take_exponentials(s, p, softmax.partial_sum);
    if (Tile::kPingPong && warpgroup == Tile::kConsumers - 1) end_turn();  // the first one begins

    bool accumulate = false;
    int slot = jobs.index;  // of the tile that P belongs to
    // The block that P would belong to: there is no P. Never a tile's first.
    bool negligible = false;
    while (true) {
      const bool last = key == key_begin;  // of the tile that P belongs to
      OnlineSoftmax<2> of_tile = softmax;
      if (unlikely(last)) {
        advance_q();
        jobs.advance();
        found = begin_tile();
        if (!found || (Tile::kPacked && !has_rows)) break;
        softmax = OnlineSoftmax<2>(softmax_scale());
        if (kSkips && skip) skip_keys();
      } else {
        key -= kN;
      }
      shared.k_full[k_ring.index].wait(k_ring.phase);
      wait_turn();
      issue_scores(s);
      if (kSkipsNegligible && negligible) {
        end_turn();
        wgmma_wait<0>();  // for S, which here is the last product issued
        shared.v_full[v_ring.index].wait(v_ring.phase);  // only to be released
      } else {
        shared.v_full[v_ring.index].wait(v_ring.phase);
        issue_output(o, p, accumulate);
        end_turn();
      }
      read_bits();
      wgmma_wait<1>();
      pin(s);
      transform(s);
      const bool masked = needs_mask();
      if (unlikely(masked)) apply_mask(s);
      end_scores(last);
      // A row that has seen no key yet gets an infinite sum from its first one.
      const bool lazy =
          kLazyMax && !(masked && kLogits != Logits::kGeneral) && !last && !is_exact();
      bool raised = false;
      if constexpr (kSkipsNegligible) {
        float row_max[2];
        find_maximum(s, row_max);
        negligible = !last && are_negligible(row_max);
        if (!negligible) raised = raise_to(row_max, factor);
      } else if (!lazy) {
        __syncwarp();  // keeps this a branch
        raised = raise_maximum(s, factor);
      }
      wgmma_wait<0>();
      pin(o);
      pin(p);  // was being read until here: its registers must not have been given to anything else
      release(shared.v_empty[v_ring.index]);
      v_ring.advance();
      accumulate = true;
      if (unlikely(last)) {
        if (kSkips && skip) skip_values();
        store(o, of_tile, slot);
        slot = jobs.index;
        accumulate = false;
      } else if (unlikely(raised)) {
        rescale(o, factor);
      }
      if (!(kSkipsNegligible && negligible)) {
        take_exponentials(s, p, sum);
        if constexpr (kLazyMax) {
          const bool fits = holds(sum, p);
          if (lazy && unlikely(!__all_sync(0xffffffffu, fits))) {
            __syncwarp();  // keeps this a branch
            if (raise_maximum(s, factor)) rescale(o, factor);
            take_exponentials(s, p, sum);
          }
        }
        softmax.partial_sum[0] += sum[0];
        softmax.partial_sum[1] += sum[1];
      }
    }
    shared.v_full[v_ring.index].wait(v_ring.phase);
    if (!(kSkipsNegligible && negligible)) issue_output(o, p, accumulate);
    wgmma_wait<0>();
    pin(o);
    if constexpr (Tile::kPacked) {
      release(shared.v_empty[v_ring.index]);
      v_ring.advance();
    }
    store(o, softmax, slot);
    return found;
  }
};

}  // namespace cutlass_kernels::fa3
